"""A math warpgroup's tile in fp8: how probabilities become an operand, how sums stay exact, where outputs lie.

An fp8 product adds in some 14 bits (Hopper), so that a long sum of P V would drift. Every kv tile's product is a sum of
its own, from zero, and is added to the output in fp32.

Of the A operand, a lane holds four neighbouring columns where the accumulator gives it two of one block of eight and
two of the next. Nothing is shuffled: P's columns are the keys in another order, and `Transposition` writes V's in the
same.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.epilogue import Unfinished
from cute_attn.kernels.blocks.softmax import INFINITY, OnlineSoftmax
from cute_attn.kernels.blocks.store import GroupStore
from cute_attn.kernels.blocks.wgmma import GroupTile
from cute_attn.kernels.memory import LINE, Fp8Memory

P_DTYPE = "float8_e4m3fn"
P_LOG2 = 3.0  # the highest probability when an anchor is set is 2^3; e4m3 is full in precision from 2^-6 to 448
SUM_LIMIT = (
    448.0  # of a thread's probabilities of a row: none is above e4m3's largest then. 32 times 2^3 are not beyond
)


@dataclass(frozen=True)
class Fp8Tile(GroupTile):
    def v_operand(self, address: Int32) -> Int32:
        return self.k_operand(address)

    def product(self, p: list[Int32], v: Int32) -> list[Float32]:
        """Starts P V, from zero; V transposed."""
        steps = []
        for step in range(self.memory.tile.cols // 32):
            column, within = step // 4, step % 4 * 32
            steps.append(column * self.memory.head_dim_vo * LINE + within)
        return sm90.wgmma_from_registers(P_DTYPE, self.dtype, self.memory.head_dim_vo, p, v, steps)

    def probabilities(self, s: list[Float32]) -> list[Int32]:
        """Of every 32 keys: row slot 0, then 1, of the first 16, then of the others."""
        words = []
        for i in range(0, len(s), 8):
            for row in (i, i + 2):
                words.append(sm90.pack_e4m3([s[row], s[row + 1], s[row + 4], s[row + 5]]))
        return words


@dataclass(frozen=True)
class Fp8Softmax(OnlineSoftmax):
    """Every row has a scale of its own; probabilities use e4m3's range."""

    row_scales: list[Float32]

    def scale(self, slot: int) -> Float32:
        return self.row_scales[slot]

    def first_shift(self, s: list[Float32]) -> list[Float32]:
        return [shift + Float32(P_LOG2) for shift in super().first_shift(s)]

    def follow(self, old: list[Float32], s: list[Float32], may_be_empty: bool) -> tuple[list[Float32], list[Float32]]:
        """(shifts, factors of what was summed before)."""
        new, factors = [], []
        for slot, (before, high) in enumerate(zip(old, self.highs(s), strict=True)):
            shift = ptx.fmin(before, ptx.fma(Float32(0.0) - high, self.scale(slot), Float32(P_LOG2)))
            factor = ptx.exp2(shift - before)
            if may_be_empty:
                factor = ptx.select(shift == Float32(INFINITY), Float32(1.0), factor)
            new.append(shift)
            factors.append(factor)
        return new, factors

    def too_high(self, sums: list[Float32]) -> Boolean:
        """Some of this thread's probabilities may be beyond e4m3, or a row had no anchor (infinite, or NaN)."""
        within = [Boolean(total <= Float32(SUM_LIMIT)) for total in sums]
        return cutlass.and_(*within) == Boolean(False)


@dataclass(frozen=True)
class Transposition:
    """Of V tiles, by warps beside the producer's: [key][d] as TMA brings it becomes [d][key].

    ldmatrix.trans of 16-bit elements leaves a lane with two neighbouring dimensions of two neighbouring keys, and four
    such matrices hold 32 keys. Even and odd dimensions go to lines eight apart: a matrix's lines then differ in bank.
    """

    memory: Fp8Memory
    warp: Int32
    lane: Int32
    warps: int
    barrier: int  # named, of these warps

    @cute.jit
    def run(self, source: Int32, target: Int32) -> None:
        """In pieces of 32 keys by 64 dimensions."""
        memory = self.memory
        halves, inner = memory.head_dim_vo // 64, self.lane & 7
        read = source + self.lane * LINE
        odd, second = (self.lane >> 3) & 1, self.lane >> 4  # of the matrix whose line this lane addresses
        write = target + (odd * 8 + inner) * LINE
        for piece in cutlass.range(self.warp, memory.tile.cols // 32 * halves, self.warps, unroll=1):
            keys, half = piece // halves, piece % halves
            line = read + keys * (32 * LINE) + (half >> 1) * (memory.tile.cols * LINE)
            place = line + ((inner ^ ((half & 1) << 2)) << 4)
            line = write + (keys >> 2) * (memory.head_dim_vo * LINE) + half * (64 * LINE)
            into = line + (((inner ^ second) ^ ((keys & 3) << 1)) << 4)
            for i in cutlass.range_constexpr(4):  # one at a time: more registers there are not
                a, b, c, d = ptx.ldmatrix_x4(place ^ Int32(i << 4), 0, transpose=True)
                even = [ptx.permute(a, b, 0x6420), ptx.permute(c, d, 0x6420)]
                uneven = [ptx.permute(a, b, 0x7531), ptx.permute(c, d, 0x7531)]
                sm90.stmatrix_x4(into, i * (16 * LINE), [even[0], uneven[0], even[1], uneven[1]])

    @cute.jit
    def clear(self, source: Int32, first: Int32) -> None:
        """Keys from `first` on become zeros: they are another request's, or nobody's, and 0 * NaN is no 0."""
        cols = self.memory.tile.cols
        thread = self.warp * 32 + self.lane
        for chunk in cutlass.range(thread, (cols - first) * (LINE // 16), 32 * self.warps, unroll=1):
            for column in cutlass.range_constexpr(self.memory.vo_columns):
                at = source + first * LINE + chunk * 16
                ptx.st_shared_v4(at, column * cols * LINE, [Int32(0) for _ in range(4)])
        sm90.named_sync(Int32(self.barrier), 32 * self.warps)


@dataclass(frozen=True)
class Fp8Store(GroupStore):
    """Blocks 2 b and 2 b + 1 are even and odd dimensions: a lane has four neighbouring ones of every 16."""

    def neighbours(self, values: list[Float32]) -> list[list[Float32]]:
        return [[values[i], values[i + 2], values[i + 1], values[i + 3]] for i in range(0, len(values), 4)]

    @cute.jit
    def store_pairs(self, row: Int32, values: list[Float32]) -> None:
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.lanes.lane % 4 * 16)
            for i, four in enumerate(self.neighbours(values)):
                ptx.st_global_v4_f32(address, i * 64, four)

    @cute.jit
    def store_pieces(self, row: Int32, values: list[Float32]) -> None:
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.lanes.lane % 4 * 8)
            for i, four in enumerate(self.neighbours(values)):
                packed = [ptx.pack_16(self.target.dtype, four[j], four[j + 1]) for j in (0, 2)]
                ptx.st_global_v2(address, i * 32, packed)


@dataclass(frozen=True)
class ScaledUnfinished(Unfinished):
    """Partial outputs already hold their head's scale, which the merge knows nothing of."""

    v_scale: Float32

    def row(self, maximum: Float32, total: Float32, head: Int32) -> tuple[Float32, Float32]:
        factor, lse = super().row(maximum, total, head)
        return factor * self.v_scale, lse
