"""Where a tile's tokens and chunks of 16 bytes are: in shared memory, and in the operands of a warp's products.

A copy of a row into shared memory is divided among lanes, each of which finds the row's address for itself. Chunks of a
row are swizzled, so that what a warp reads together differs in bank.

An operand of S^T has 16 tokens as rows: lanes with the same g = lane // 4 hold those of rows g and g + 8. In P^T a lane
holds those of rows 2t, 2t + 1, 2t + 8 and 2t + 9, t = lane % 4. Which tokens of a tile they are is free.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import CHUNK, swizzled, swizzled_offset
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.xqa.smem import XqaMemory


@dataclass(frozen=True)
class TileLayout:
    """Rows as `ldmatrix` reads them, tokens in their order. A lane copies one chunk of a line.

    `row_bytes`: distance of two tokens in K or V.
    """

    row_bytes: int

    @property
    def chunks_per_line(self) -> int:
        return min(self.row_bytes, LINE) // CHUNK

    @property
    def lanes_per_row(self) -> int:
        """Number of lanes that copy a row together."""
        return self.chunks_per_line

    @property
    def rows_per_step(self) -> int:
        """Number of rows that a warp copies at once."""
        return 32 // self.lanes_per_row

    def offset(self, row: Int32, chunk: Int32) -> Int32:
        """Byte offset of a chunk in the first line of a row."""
        return swizzled(row, chunk, self.row_bytes)

    def step_bits(self, first: int) -> int:
        """Bits to XOR into the offset of a row below `rows_per_step` for the row `first` further on: the two have no
        bits in common, so the swizzle of their sum is the XOR of both swizzles."""
        per_line = max(1, LINE // self.row_bytes)
        return ((first // per_line) & (self.chunks_per_line - 1)) * CHUNK

    def lane_token(self, g: Int32) -> Int32:
        """Token of row g of the first operand, in its tile."""
        return g

    def token(self, m: int, half: int) -> int:
        """Distance from there to the token of row g + 8 * half of operand m."""
        return 16 * m + 8 * half


@dataclass(frozen=True)
class BlockLayout(TileLayout):
    """Rows of NVFP4 as `BlockReads` reads them: with ordinary loads, each lane whole blocks of 16 elements.

    Rows of 128 bytes have the swizzle of `TileLayout`. Two rows of 64 bytes share a line, and a warp reads only even or
    only odd tokens at a time, which would all be in one half of their lines: lines 1 and 4 apart exchange their halves.
    A lane copies two chunks, half a row apart, so that every access still takes whole sectors of 32 bytes.
    """

    @property
    def two_per_line(self) -> bool:
        return self.row_bytes < LINE

    @property
    def lanes_per_row(self) -> int:
        return self.chunks_per_line // 2

    def offset(self, row: Int32, chunk: Int32) -> Int32:
        offset = swizzled(row, chunk, self.row_bytes)
        return offset ^ (self.exchanged(row >> 1) * self.row_bytes) if self.two_per_line else offset

    def exchanged(self, line: Int32) -> Int32:
        """1 if the halves of a line are exchanged, else 0."""
        return (line ^ line >> 2) & 1

    def step_bits(self, first: int) -> int:
        return 0  # steps are whole periods of the swizzle

    def lane_token(self, g: Int32) -> Int32:
        """With two tokens to a line, lane t holds tokens 2t + 8 r of P^T, r = 0..3, of every fourth line: one
        `ldmatrix` gives a lane the scales of four lines, of even and of odd tokens."""
        return (g >> 1) * 2 + (g & 1) * 8 if self.two_per_line else g

    def token(self, m: int, half: int) -> int:
        return 16 * half + m % 2 + 32 * (m // 2) if self.two_per_line else 16 * m + 8 * half

    def p_token(self, m: int, r: int) -> int:
        """Distance from token 2t to the one that is contraction index r = 0..3 of lane t in operand m of P^T."""
        return self.token(m, r // 2) + r % 2 * (8 if self.two_per_line else 1)

    def p_lane_token(self, r: Int32, t: Int32) -> Int32:
        """Token of contraction index r of lane t in the first operand of P^T."""
        return r * 8 + t * 2 if self.two_per_line else (r & 1) + (r >> 1) * 8 + t * 2

    def moved(self, address: Int32, tokens: int, chunks: int = 0) -> tuple[Int32, int]:
        """Returns (register, immediate) of what is `tokens` (of `token` or `p_token`) below an address and `chunks` to
        the right. Neither has bits in common with what the address stands for, so the swizzle of the sum is the XOR."""
        if self.two_per_line:
            bits, lines = ((tokens ^ tokens >> 3) & 1) * self.row_bytes, tokens // 2
        else:
            bits, lines = tokens % 8 * CHUNK, tokens
        bits ^= chunks * CHUNK
        return (address ^ Int32(bits) if bits else address), lines * LINE


# --- reads ------------------------------------------------------------------------------------------------------------


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
        return [[(group, m) for m in range(self.memory.spec.cols // 16)] for group in range(self.groups)]

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
        return [[(group, m)] for group in range(self.groups) for m in range(self.memory.spec.cols // 16)]

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
