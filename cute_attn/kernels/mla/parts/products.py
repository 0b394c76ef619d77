"""Where a thread is, and products of its warp: S = Q K^T for its rows and tokens, O += P V for its rows and columns.

Keys and values are the same tile: rows of tokens, read as they are for S, transposed for O.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import FragmentPosition, MmaFragmentLayout
from cute_attn.kernels.blocks.scalars import warp_index
from cute_attn.kernels.blocks.smem import CHUNK, swizzled, swizzled_offset
from cute_attn.kernels.blocks.tma import named_sync
from cute_attn.kernels.mla.smem import MlaMemory
from cute_attn.kernels.mla.spec import LATENT, MlaSpec

FIRST_BARRIER = 1  # of the row groups; barrier 0 is that of the CTA


@dataclass(frozen=True)
class Place(FragmentPosition):
    """Adjacent warps have other rows, warps `row_groups` apart the same rows and other tokens and columns."""

    spec: MlaSpec
    warp: Int32
    lane: Int32

    @classmethod
    def of_thread(cls, spec: MlaSpec) -> "Place":
        return cls(spec, warp_index(), cute.arch.thread_idx()[0] & 31)

    @property
    def group_rows(self) -> int:
        """Rows of a warp."""
        return self.spec.rows // self.spec.row_groups

    @property
    def slice_cols(self) -> int:
        """Tokens of a warp's scores."""
        return self.spec.cols // self.spec.slices

    @property
    def slice_dim(self) -> int:
        """Columns of a warp's outputs."""
        return LATENT // self.spec.slices

    @property
    def scores(self) -> MmaFragmentLayout:
        return MmaFragmentLayout(self.group_rows // 16, self.slice_cols // 8)

    @property
    def outputs(self) -> MmaFragmentLayout:
        return MmaFragmentLayout(self.group_rows // 16, self.slice_dim // 8)

    @property
    def row_group(self) -> Int32:
        return self.warp % self.spec.row_groups

    @property
    def warp_col(self) -> Int32:
        return self.warp // self.spec.row_groups

    @property
    def first_row(self) -> Int32:
        """First row of the warp in the CTA's tile."""
        return self.row_group * self.group_rows

    def first_warp_col(self) -> Int32:
        return self.warp_col * self.slice_cols

    def sync_group(self) -> None:
        """Barrier of the warps that have the same rows."""
        if self.spec.row_groups == 1:
            ptx.sync_threads()
        else:
            named_sync(FIRST_BARRIER + self.row_group, self.spec.threads // self.spec.row_groups)


PAIR = 32  # columns of two steps
CHAINS = 4  # sums in turn, so that products of few blocks do not wait for one another


@dataclass(frozen=True)
class Products:
    memory: MlaMemory
    place: Place
    base: Int32  # of shared memory

    @property
    def dtype(self) -> str:
        return self.memory.spec.dtype

    # --- scores ------------------------------------------------------------------------------------------------------

    def scores(self, slot: Int32, scales: tuple[Float32, Float32]) -> list[Float32]:
        """Compute S of the tile at `slot`. `scales`: of products of latent and of rotated columns."""
        addresses = self.q_address(), self.k_address(slot)
        latent = self.partial_scores(addresses, range(LATENT // PAIR))
        if not self.memory.spec.rope_bits:
            return [x * scales[0] for x in latent]
        rotated = self.partial_scores(addresses, range(LATENT // PAIR, self.memory.spec.columns // PAIR))
        return [ptx.fma(x, scales[0], y * scales[1]) for x, y in zip(latent, rotated, strict=True)]

    def partial_scores(self, addresses: tuple[Int32, Int32], pairs: range) -> list[Float32]:
        """Multiply some columns of Q and K. One ldmatrix brings 32 of 8 tokens, another 16 of 16 query rows."""
        layout, (q, k) = self.place.scores, addresses
        chains = max(1, CHAINS // (layout.m_blocks * layout.n_blocks))
        sums = [layout.zeros() for _ in range(chains)]
        for pair in pairs:
            tokens = [self.rows_at(k, 8 * n, 4 * pair) for n in range(layout.n_blocks)]
            for half in range(2):
                step = 2 * pair + half
                for m in range(layout.m_blocks):
                    a = self.rows_at(q, 16 * m, 2 * step)
                    for n, four in enumerate(tokens):
                        self.mma(sums[step % chains], layout.block(m, n), a, four[2 * half : 2 * half + 2])
        total = sums[0]
        for more in sums[1:]:
            total = [x + y for x, y in zip(total, more, strict=True)]
        return total

    def q_address(self) -> Int32:
        """Address of this lane's row of Q, of chunk 0 or 1."""
        lane, place = self.place.lane, self.place
        at = self.base + Int32(self.memory.q) + place.first_row * self.memory.row_bytes
        return at + swizzled(lane & 15, lane >> 4, self.memory.row_bytes)

    def k_address(self, slot: Int32) -> Int32:
        """Address of this lane's token of the slice, of one of chunks 0 to 3."""
        lane, place = self.place.lane, self.place
        at = slot + place.warp_col * (place.slice_cols * self.memory.row_bytes)
        return at + swizzled(lane & 7, lane >> 3, self.memory.row_bytes)

    def rows_at(self, address: Int32, rows: int, chunks: int) -> list[Int32]:
        """Load matrices `rows` rows below and `chunks` chunks to the right of an address."""
        at, within = swizzled_offset(address, chunks)
        return ptx.ldmatrix_x4(at, rows * self.memory.row_bytes + within)

    # --- outputs -----------------------------------------------------------------------------------------------------

    def accumulate(self, out: list[Float32], slot: Int32) -> list[Float32]:
        """Add P V of the tile at `slot`; P is in shared memory."""
        layout, acc = self.place.outputs, list(out)
        p, v = self.p_address(), self.v_address(slot)
        for step in range(self.memory.spec.cols // 16):
            a = [self.probabilities(p, m, step) for m in range(layout.m_blocks)]
            for pair in range(layout.n_blocks // 2):
                at, within = swizzled_offset(v, 2 * pair)
                four = ptx.ldmatrix_x4(at, 16 * step * self.memory.row_bytes + within, transpose=True)
                for m in range(layout.m_blocks):
                    for half in range(2):
                        block = layout.block(m, 2 * pair + half)
                        self.mma(acc, block, a[m], four[2 * half : 2 * half + 2])
        return acc

    def v_address(self, slot: Int32) -> Int32:
        """Address of this lane's token, of the first or second chunk of the slice."""
        lane, place = self.place.lane, self.place
        columns = place.warp_col * (place.slice_dim // 8 * CHUNK)  # whole lines: the swizzle stays within one
        return slot + columns + swizzled(lane & 15, lane >> 4, self.memory.row_bytes)

    def p_address(self) -> Int32:
        """Address of this lane's row of P, of chunk 0 or 1."""
        lane, pitch = self.place.lane, self.memory.p_pitch
        return self.base + Int32(self.memory.p) + (self.place.first_row + (lane & 15)) * pitch + (lane >> 4) * CHUNK

    def probabilities(self, address: Int32, m: int, step: int) -> list[Int32]:
        return ptx.ldmatrix_x4(address, 16 * m * self.memory.p_pitch + 2 * step * CHUNK)

    def mma(self, acc: list[Float32], block: int, a: list[Int32], b: list[Int32]) -> None:
        acc[block : block + 4] = ptx.mma(self.dtype, self.dtype, a, b, acc[block : block + 4])
