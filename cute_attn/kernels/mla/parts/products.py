"""Products of a warp: S = Q K^T for its rows and tokens, and O += P V for its rows and columns.

Keys and values are the same tile: rows of tokens, read as they are for S, transposed for O.
"""

from dataclasses import dataclass

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import CHUNK, swizzled, swizzled_offset
from cute_attn.kernels.mla.parts.place import Place
from cute_attn.kernels.mla.smem import MlaMemory
from cute_attn.kernels.mla.spec import LATENT

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
        at = slot + place.slice * (place.slice_cols * self.memory.row_bytes)
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
        columns = place.slice * (place.slice_dim // 8 * CHUNK)  # whole lines: the swizzle stays within one
        return slot + columns + swizzled(lane & 15, lane >> 4, self.memory.row_bytes)

    def p_address(self) -> Int32:
        """Address of this lane's row of P, of chunk 0 or 1."""
        lane, pitch = self.place.lane, self.memory.p_pitch
        return self.base + Int32(self.memory.p) + (self.place.first_row + (lane & 15)) * pitch + (lane >> 4) * CHUNK

    def probabilities(self, address: Int32, m: int, step: int) -> list[Int32]:
        return ptx.ldmatrix_x4(address, 16 * m * self.memory.p_pitch + 2 * step * CHUNK)

    def mma(self, acc: list[Float32], block: int, a: list[Int32], b: list[Int32]) -> None:
        acc[block : block + 4] = ptx.mma_m16n8k16(self.dtype, a, b, acc[block : block + 4])
