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
        """Eight rows of 64 elements at a time, read while those before them are converted."""
        cols, (row, quarter) = self.memory.tile.cols, self.place
        write = target + row * LINE + ((2 * quarter) ^ row) * CHUNK
        units = cols // EIGHT * rows.columns
        words = self.read(rows, source, self.warp)
        for unit in cutlass.range(self.warp, units, self.warps, unroll=1):
            following = self.read(rows, source, ptx.minimum(unit + self.warps, Int32(units - 1)))
            pairs = [pair for word in words for pair in rows.kind.word(word)]
            eight, column = self.part(rows, unit)
            at = write + eight * (EIGHT * LINE) + column * (cols * LINE)
            ptx.st_shared_v4(at, 0, pairs[:4])
            ptx.st_shared_v4(at ^ Int32(CHUNK), 0, pairs[4:])
            words = following

    @property
    def place(self) -> tuple[Int32, Int32]:
        """Of this lane in a unit: row, and quarter of its 64 bytes."""
        return self.lane >> 2, self.lane & 3

    def part(self, rows: Rows, unit: Int32) -> tuple[Int32, Int32]:
        """Which eight rows, and which of their columns. Odd rows take an even number of columns in another order: 8
        lanes side by side then differ in bank, reading and writing.
        """
        if rows.columns == 3:
            eight = (unit * 43) >> 7  # a third, of up to 63
            return eight, unit - eight * 3
        eight, column = unit >> (rows.columns.bit_length() - 1), unit & (rows.columns - 1)
        return eight, column ^ (self.place[0] & 1) if rows.columns > 1 else column

    def read(self, rows: Rows, source: Int32, unit: Int32) -> list[Int32]:
        (row, quarter), (eight, column) = self.place, self.part(rows, unit)
        at = source + row * rows.pitch + quarter * CHUNK
        return ptx.ld_shared_v4(at + eight * (EIGHT * rows.pitch) + column * (4 * CHUNK))

    @cute.jit
    def clear(self, rows: cutlass.Constexpr, source: Int32, first: Int32) -> None:
        """Keys from `first` on become zeros: they are another request's, or nobody's, and 0 * NaN is no 0."""
        thread = self.warp * 32 + self.lane
        chunks = rows.pitch // CHUNK
        for chunk in cutlass.range(first * chunks + thread, self.memory.tile.cols * chunks, 32 * self.warps, unroll=1):
            ptx.st_shared_v4(source + chunk * CHUNK, 0, [Int32(0) for _ in range(4)])
        sm90.named_sync(Int32(self.barrier), 32 * self.warps)
