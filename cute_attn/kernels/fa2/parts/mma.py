"""Warp tiles on mma.sync m16n8k16: scores S = Q K^T and outputs O += P V.

Fragments are Python lists of registers. An accumulator of M x N 16x8 blocks is a flat list, block (m, n) at
4 * (m * N + n): registers 0, 1 are row lane // 4, columns 2 * (lane % 4) + {0, 1}; registers 2, 3 the row 8 below.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import swizzled, swizzled_offset
from cute_attn.kernels.fa2.smem import SharedMemory


@dataclass(frozen=True)
class WarpTile:
    """One warp's share of a CTA tile: `m_blocks` x 16 rows, `n_blocks` x 8 kv columns, `d_blocks` x 8 output dims."""

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
        return self.memory.head_dim_vo // 8

    @property
    def row_slots(self) -> int:
        """Rows of which one thread holds a part."""
        return 2 * self.m_blocks

    def zeros(self, blocks: int) -> list[Float32]:
        return [Float32(0.0) for _ in range(4 * self.m_blocks * blocks)]

    def scores(self, q: Int32, k: Int32, copies: Iterator[None], count: int) -> list[Float32]:
        """Computes S of this warp; `q` and `k` are the lane addresses of `Lanes` within the tiles.

        The `count` copies are issued between the k-steps: in one block before the products they would stall the tensor
        cores for a fifth of the loop (measured on an H200).
        """
        pitch = self.memory.qk_pitch
        acc = self.zeros(self.n_blocks)
        steps = self.memory.head_dim_qk // 16
        for step in range(steps):
            (q_at, q_offset), (k_at, k_offset) = swizzled_offset(q, 2 * step), swizzled_offset(k, 2 * step)
            a = [ptx.ldmatrix_x4(q_at, m * 16 * pitch + q_offset) for m in range(self.m_blocks)]
            for pair in range(self.n_blocks // 2):
                b = ptx.ldmatrix_x4(k_at, pair * 16 * pitch + k_offset)
                for m in range(self.m_blocks):
                    self._mma(acc, self.n_blocks, m, 2 * pair, a[m], b[:2])
                    self._mma(acc, self.n_blocks, m, 2 * pair + 1, a[m], b[2:])
            for _ in range(count * step // steps, count * (step + 1) // steps):
                next(copies)
        return acc

    def accumulate(self, out: list[Float32], p: list[list[list[Int32]]], v: Int32) -> list[Float32]:
        """Returns out + P V, with `p[m][step]` the A fragments of `probabilities`."""
        pitch = self.memory.vo_pitch
        acc = list(out)
        for step in range(self.n_blocks // 2):
            for pair in range(self.d_blocks // 2):
                v_at, v_offset = swizzled_offset(v, 2 * pair)
                b = ptx.ldmatrix_x4(v_at, step * 16 * pitch + v_offset, transpose=True)
                for m in range(self.m_blocks):
                    self._mma(acc, self.d_blocks, m, 2 * pair, p[m][step], b[:2])
                    self._mma(acc, self.d_blocks, m, 2 * pair + 1, p[m][step], b[2:])
        return acc

    def probabilities(self, s: list[Float32]) -> list[list[list[Int32]]]:
        """Rounds fp32 accumulator blocks to 16 bits: two adjacent C blocks are exactly one A operand."""
        packed = []
        for m in range(self.m_blocks):
            steps = []
            for step in range(self.n_blocks // 2):
                i = 4 * (m * self.n_blocks + 2 * step)
                steps.append([ptx.pack_16(self.dtype, s[i + j], s[i + j + 1]) for j in (0, 2, 4, 6)])
            packed.append(steps)
        return packed

    def _mma(self, acc: list[Float32], blocks: int, m: int, n: int, a: list[Int32], b: list[Int32]) -> None:
        i = 4 * (m * blocks + n)
        acc[i : i + 4] = ptx.mma_m16n8k16(self.dtype, a, b, acc[i : i + 4])


@dataclass(frozen=True)
class Lanes:
    """Position of this thread: its warp, and its ldmatrix row addresses inside the Q, K and V tiles."""

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
        row0 = warp_row * (tile.rows // tile.warps_rows)
        col0 = warp_col * (tile.cols // tile.warps_cols)
        # A (row-major 16x16): lanes 0-15 give rows at k 0, lanes 16-31 the same rows at k 8.
        q = swizzled(row0 + lane % 16, lane // 16, memory.qk_pitch)
        # B from K, whose rows are the product's columns: matrices (n, k) = (0-7, 0), (0-7, 8), (8-15, 0), (8-15, 8).
        k = swizzled(col0 + lane % 8 + lane // 16 * 8, lane // 8 % 2, memory.qk_pitch)
        # B from V, transposed on the way: lanes 0-15 tokens at d 0, lanes 16-31 the same tokens at d 8.
        v = swizzled(col0 + lane % 16, lane // 16, memory.vo_pitch)
        return cls(warp_row, warp_col, lane, q, k, v)

    def row(self, memory: SharedMemory, slot: int) -> Int32:
        """Tile row of this thread's row slot: slots 2m and 2m + 1 are the upper and lower row of block m."""
        rows_per_warp = memory.tile.rows // memory.tile.warps_rows
        return self.warp_row * rows_per_warp + self.lane // 4 + (slot // 2) * 16 + (slot % 2) * 8

    def first_col(self, memory: SharedMemory) -> Int32:
        """Tile column of this thread's first score; score (n, j) is n * 8 + j columns to the right."""
        return self.warp_col * (memory.tile.cols // memory.tile.warps_cols) + self.lane % 4 * 2
