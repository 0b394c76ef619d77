"""Warp tiles on mma.sync m16n8k16: scores S = Q K^T and outputs O += P V.

Fragments are Python lists of registers; `MmaFragmentLayout` says how accumulators lie in them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import FragmentPosition, MmaFragmentLayout
from cute_attn.kernels.blocks.smem import CHUNK, swizzled, swizzled_offset
from cute_attn.kernels.blocks.softmax import Running, RunningSoftmax
from cute_attn.kernels.fa2.smem import SharedMemory


@dataclass(frozen=True)
class WarpTile:
    """One warp's share of a CTA tile: `m_blocks` x 16 rows, `n_blocks` x 8 kv columns, `d_blocks` x 8 output dims.

    Head dims count to whole 16 columns; those past the end are zeros in shared memory.
    """

    dtype: str
    memory: SharedMemory

    @property
    def m_blocks(self) -> int:
        return self.memory.tile.rows // self.memory.tile.warps_rows // 16

    @property
    def n_blocks(self) -> int:
        return self.memory.tile.cols // self.memory.tile.warps_cols // 8

    @property
    def d_blocks(self) -> int:
        return -(-self.memory.head_dim_vo // 16) * 2

    @property
    def scores_layout(self) -> MmaFragmentLayout:
        return MmaFragmentLayout(self.m_blocks, self.n_blocks)

    @property
    def output_layout(self) -> MmaFragmentLayout:
        return MmaFragmentLayout(self.m_blocks, self.d_blocks)

    def scores(self, q: Int32, k: Int32, copies: Iterator[None], count: int) -> list[Float32]:
        """Computes S of this warp; `q` and `k` are the lane addresses of `Lanes` within the tiles.

        The `count` copies are issued between the k-steps: in one block before the products they would stall the tensor
        cores for a fifth of the loop (measured on an H200).
        """
        pitch = self.memory.qk_pitch
        layout = self.scores_layout
        acc = layout.zeros()
        steps = -(-self.memory.q_bytes // 32)  # of 16 numbers of 16 bits, or of 32 of 8
        for step in range(steps):
            (q_at, q_offset), (k_at, k_offset) = swizzled_offset(q, 2 * step), swizzled_offset(k, 2 * step)
            a = [ptx.ldmatrix_x4(q_at, m * 16 * pitch + q_offset) for m in range(self.m_blocks)]
            for pair in range(self.n_blocks // 2):
                b = ptx.ldmatrix_x4(k_at, pair * 16 * pitch + k_offset)
                for m in range(self.m_blocks):
                    self._mma(acc, layout.block(m, 2 * pair), a[m], b[:2])
                    self._mma(acc, layout.block(m, 2 * pair + 1), a[m], b[2:])
            for _ in range(count * step // steps, count * (step + 1) // steps):
                next(copies)
        return acc

    def accumulate(self, out: list[Float32], p: list[list[list[Int32]]], v: Int32) -> list[Float32]:
        """Returns out + P V, with `p[m][step]` A fragments as those of `probabilities`."""
        pitch, layout = self.memory.vo_pitch, self.output_layout
        acc = list(out)
        for step in range(len(p[0])):
            for pair in range(self.d_blocks // 2):
                v_at, v_offset = swizzled_offset(v, 2 * pair)
                b = ptx.ldmatrix_x4(v_at, step * 16 * pitch + v_offset, transpose=True)
                for m in range(layout.m_blocks):
                    self._mma(acc, layout.block(m, 2 * pair), p[m][step], b[:2])
                    self._mma(acc, layout.block(m, 2 * pair + 1), p[m][step], b[2:])
        return acc

    def probabilities(self, s: list[Float32]) -> list[list[list[Int32]]]:
        """Rounds fp32 accumulator blocks to 16 bits: two adjacent C blocks are exactly one A operand."""
        packed = []
        for m in range(self.m_blocks):
            steps = []
            for step in range(self.n_blocks // 2):
                i = self.scores_layout.block(m, 2 * step)
                steps.append(ptx.pack_pairs(self.dtype, s[i : i + 8]))
            packed.append(steps)
        return packed

    def _mma(self, acc: list[Float32], block: int, a: list[Int32], b: list[Int32]) -> None:
        acc[block : block + 4] = ptx.mma(self.dtype, self.dtype, a, b, acc[block : block + 4])


@dataclass(frozen=True)
class Lanes(FragmentPosition):
    """Position of this thread: its warp, and its ldmatrix row addresses inside the Q, K and V tiles."""

    rows_per_warp: int
    cols_per_warp: int
    warp_row: Int32
    warp_col: Int32
    lane: Int32
    q: Int32
    k: Int32
    v: Int32

    @classmethod
    def of(cls, memory: SharedMemory, thread: Int32) -> "Lanes":
        tile = memory.tile
        warp, lane = cute.arch.make_warp_uniform(thread >> 5), thread & 31
        warp_row, warp_col = warp // tile.warps_cols, warp % tile.warps_cols
        rows_per_warp, cols_per_warp = tile.rows // tile.warps_rows, tile.cols // tile.warps_cols
        row0, col0 = warp_row * rows_per_warp, warp_col * cols_per_warp
        # A (row-major 16x16): lanes 0-15 give rows at k 0, lanes 16-31 the same rows at k 8.
        q = swizzled(row0 + lane % 16, lane // 16, memory.qk_pitch)
        if cols_per_warp == 8:  # matrices (n, k) = (0-7, 0), (0-7, 8), (0-7, 16), (0-7, 24)
            k = swizzled(col0 + lane % 8, lane // 8, memory.qk_pitch)
        else:  # B from K, whose rows are the product's columns: (0-7, 0), (0-7, 8), (8-15, 0), (8-15, 8)
            k = swizzled(col0 + lane % 8 + lane // 16 * 8, lane // 8 % 2, memory.qk_pitch)
        # B from V, transposed on the way: lanes 0-15 tokens at d 0, lanes 16-31 the same tokens at d 8.
        if memory.fp8:  # 32 tokens at d 0
            v = swizzled(col0 + lane, Int32(0), memory.vo_pitch)
        elif tile.exchange:
            v = swizzled(lane % 16, warp * (memory.slice_bytes // CHUNK) + lane // 16, memory.vo_pitch)
        else:
            v = swizzled(col0 + lane % 16, lane // 16, memory.vo_pitch)
        return cls(rows_per_warp, cols_per_warp, warp_row, warp_col, lane, q, k, v)

    @property
    def first_row(self) -> Int32:
        return self.warp_row * self.rows_per_warp

    def first_warp_col(self) -> Int32:
        return self.warp_col * self.cols_per_warp


@dataclass(frozen=True)
class OwnRows:
    """Softmax of rows whose scores and outputs one warp holds, and the products with V."""

    tile: WarpTile
    softmax: RunningSoftmax
    lanes: Lanes

    def add(self, running: Running, s: list[Float32], operand: Int32, masked: bool) -> Running:
        """Adds a tile with scores `s` and 16-bit K and V at `operand` to the running state."""
        softmax = self.softmax
        running = softmax.raise_anchors(running, softmax.row_max(s))
        p = softmax.exponentials(s, running.shift, may_be_empty=masked)
        total = softmax.sums(p, running.total)
        v = operand + Int32(self.tile.memory.operand_v) + self.lanes.v
        out = self.tile.accumulate(running.out, self.tile.probabilities(p), v)
        return Running(out, running.shift, total)
