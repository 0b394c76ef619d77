"""fp8 K and V tiles, rows side by side as TMA brings them, to the 16-bit operands of wgmma: lines of 128 bytes of all
rows, one column of 64 elements after the other, swizzled.

P is rounded to fp16 whatever q is: it is below 2^14, and fp8 goes to fp16 in one instruction a pair, to bf16 in four.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.convert import Fp8
from cute_attn.kernels.blocks.smem import CHUNK
from cute_attn.kernels.blocks.wgmma import GroupTile
from cute_attn.kernels.memory import LINE, WidenedMemory

P_DTYPE = "float16"
EIGHT = 8  # rows, after which the swizzle repeats; a warp's four lanes a row read 64 elements


@dataclass(frozen=True)
class WidenedTile(GroupTile):
    def accumulate(self, out: list[Float32], p: list[Int32], v: Int32) -> list[Float32]:
        steps = range(0, self.memory.tile.cols * LINE, 16 * LINE)
        return sm90.wgmma_from_registers(P_DTYPE, P_DTYPE, self.memory.head_dim_vo, p, v, steps, out)

    def probabilities(self, s: list[Float32]) -> list[Int32]:
        return [ptx.pack_16(P_DTYPE, s[i], s[i + 1]) for i in range(0, len(s), 2)]


@dataclass(frozen=True)
class Rows:
    """K or V: its rows as stored, and what becomes of them."""

    columns: int
    pitch: int
    kind: Fp8


@dataclass(frozen=True)
class Widening:
    memory: WidenedMemory
    warp: Int32
    lane: Int32
    warps: int
    barrier: int  # named, of these warps
    k: Rows
    v: Rows

    @cute.jit
    def run(self, rows: cutlass.Constexpr, source: Int32, target: Int32) -> None:
        """Eight rows at a time. Odd ones take an even number of columns in another order: 8 lanes side by side then
        differ in bank, reading and writing.
        """
        cols, columns, pitch = self.memory.tile.cols, rows.columns, rows.pitch
        row, quarter = self.lane >> 2, self.lane & 3
        read, write = source + row * pitch + quarter * CHUNK, target + row * LINE + ((2 * quarter) ^ row) * CHUNK
        swapped = (row & 1) * (1 - columns % 2)
        reads = [read + swapped * (sign * pitch // columns) for sign in (1, -1)]
        writes = [write + swapped * (sign * cols * LINE) for sign in (1, -1)]
        for i in cutlass.range(self.warp, cols // EIGHT, self.warps, unroll=1):
            words = [ptx.ld_shared_v4(reads[c % 2] + i * (EIGHT * pitch), c * pitch // columns) for c in range(columns)]
            for c in cutlass.range_constexpr(columns):
                pairs = [pair for word in words[c] for pair in rows.kind.word(word)]
                at = writes[c % 2] + i * (EIGHT * LINE)
                ptx.st_shared_v4(at, c * cols * LINE, pairs[:4])
                ptx.st_shared_v4(at ^ Int32(CHUNK), c * cols * LINE, pairs[4:])

    @cute.jit
    def clear(self, rows: cutlass.Constexpr, source: Int32, first: Int32) -> None:
        """Keys from `first` on become zeros: they are another request's, or nobody's, and 0 * NaN is no 0."""
        thread = self.warp * 32 + self.lane
        chunks = rows.pitch // CHUNK
        for chunk in cutlass.range(first * chunks + thread, self.memory.tile.cols * chunks, 32 * self.warps, unroll=1):
            ptx.st_shared_v4(source + chunk * CHUNK, 0, [Int32(0) for _ in range(4)])
        sm90.named_sync(Int32(self.barrier), 32 * self.warps)
