"""Reads of K and V tiles from shared memory, as operands before their conversion (`formats`)."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import swizzled_offset
from cute_attn.kernels.xqa.parts.layouts import BlockLayout, TileLayout
from cute_attn.kernels.xqa.smem import XqaMemory

Turn = list[tuple[int, int]]  # (group of columns, operand of 16 tokens)


@dataclass(frozen=True)
class MatrixReads:
    """`ldmatrix` of 16 tokens x 32 bytes: a lane gets a word of each of two tokens and two chunks, transposed for V.

    `transposed_pairs`: the four matrices of V are at (token, chunk) = (0, 0), (0, 1), (8, 0), (8, 1), not (0, 0),
    (8, 0), (0, 1), (8, 1).
    """

    memory: XqaMemory
    layout: TileLayout
    transposed_pairs: bool

    @property
    def groups(self) -> int:
        """Groups of columns, each of which is one read of an operand."""
        return self.memory.loads

    @property
    def k_turns(self) -> list[Turn]:
        """Reads of K in order, in turns between which the caller may do something else."""
        return [[(group, m) for m in range(self.memory.cols // 16)] for group in range(self.groups)]

    def k_address(self, slot: Int32) -> Int32:
        lane = cute.arch.thread_idx()[0] & 31
        return slot + self.layout.offset(lane & 15, lane >> 4)

    def v_address(self, slot: Int32) -> Int32:
        tile = slot + Int32(self.memory.v)
        lane = cute.arch.thread_idx()[0] & 31
        if self.transposed_pairs:
            return tile + self.layout.offset((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1)
        return tile + self.layout.offset(lane & 15, lane >> 4)

    def k_words(self, at: Int32, group: int, m: int) -> list[Int32]:
        return self._matrices(at, group, m, False)

    def v_words(self, at: Int32, group: int, m: int) -> list[Int32]:
        return self._matrices(at, group, m, True)

    def _matrices(self, at: Int32, group: int, m: int, transpose: bool) -> list[Int32]:
        address, offset = swizzled_offset(at, 2 * group)
        return ptx.ldmatrix_x4(address, offset + m * 16 * self.memory.row_bytes, transpose=transpose)


@dataclass(frozen=True)
class BlockReads:
    """Ordinary loads of NVFP4, after which all that a lane has of a token is of few scale blocks.

    K: lane t of a token's four reads its quarter of the columns, 16 bytes at a time. V: lane g reads block g of every
    128 columns, 8 bytes, of four tokens. What a lane reads of K is any quarter of the contraction, and of V any rows
    of O^T: both orders are free.
    """

    memory: XqaMemory
    layout: BlockLayout

    @property
    def groups(self) -> int:
        return self.memory.loads // 2

    @property
    def k_turns(self) -> list[Turn]:
        return [[(group, m)] for group in range(self.groups) for m in range(self.memory.cols // 16)]

    def k_address(self, slot: Int32) -> Int32:
        lane = cute.arch.thread_idx()[0] & 31
        return slot + self.layout.offset(self.layout.lane_token(lane >> 2), (lane & 3) * self.groups)

    def v_address(self, slot: Int32) -> Int32:
        lane = cute.arch.thread_idx()[0] & 31
        chunk = self.layout.offset((lane & 3) * 2, lane >> 3)
        return slot + chunk + ((lane >> 2 & 1) * 8 + self.memory.v)

    def k_words(self, at: Int32, group: int, m: int) -> list[Int32]:
        """Four words of the token of row g, then of row g + 8."""
        places = [self.layout.moved(at, self.layout.token(m, half), group) for half in (0, 1)]
        return [word for address, offset in places for word in ptx.ld_shared_v4(address, offset)]

    def v_words(self, at: Int32, group: int, m: int) -> list[Int32]:
        """Two words of each of the lane's four tokens."""
        places = [self.layout.moved(at, self.layout.p_token(m, r), 4 * group) for r in range(4)]
        return [word for address, offset in places for word in ptx.ld_shared_v2(address, offset)]
