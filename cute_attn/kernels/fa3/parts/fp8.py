"""fp8 tile of an MMA warpgroup: P as an operand, accuracy of sums, layout of outputs.

In the A operand a lane holds four adjacent columns; in the accumulator it holds two of one block of eight and two of
the next. No registers are shuffled: the columns of P are permuted keys, and `VTranspose` writes V in the same order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx, sm90, tma
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.softmax import P_DTYPE, P_MAX, PEAK_LOG2, E4m3Softmax
from cute_attn.kernels.blocks.warpgroup_store import NarrowStore, WarpgroupStore
from cute_attn.kernels.fa3.parts.wgmma import WarpgroupTile
from cute_attn.kernels.fa3.smem import Fp8Memory
from cute_attn.kernels.formats import LINE

SUM_LIMIT = P_MAX  # of a thread's part of a row of P: no element then exceeds e4m3's maximum


@dataclass(frozen=True)
class Fp8Tile(WarpgroupTile):
    memory: Fp8Memory

    def v_operand(self, address: Int32) -> Int32:
        return self.k_operand(address)

    def accumulate(self, out: list[Float32], p: list[Int32], v: Int32) -> list[Float32]:
        """Starts out + P V, with V transposed."""
        line, steps = self.memory.key_line, []
        for key in range(0, self.memory.tile.cols, 32):
            column, within = divmod(key, line)
            steps.append(column * self.memory.transposed_dims * line + within)
        a = sm90.MatrixA(p)
        return sm90.wgmma(P_DTYPE, self.dtype, self.memory.head_dim_vo, a, v, steps, out, line=line)

    def probabilities(self, s: list[Float32]) -> list[Int32]:
        """Packs P; of every 32 keys, row slots 0 and 1 of the first 16, then those of the other 16."""
        layout, words = self.scores_layout, []
        for n in range(0, layout.n_blocks, 2):
            for slot in layout.slots:
                first, second = (layout.pairs(slot)[i][0] for i in (n, n + 1))
                words.append(ptx.pack_8(P_DTYPE, [*s[first : first + 2], *s[second : second + 2]]))
        return words

    def scaled(self, p: list[Int32], factors: list[Float32]) -> list[Int32]:
        """Multiplies P by a power of two per row."""
        pairs = [ptx.pack_16("float16", factor, factor) for factor in factors]
        words = []
        for i, word in enumerate(p):
            halves = ptx.e4m3x4_to_f16(word, native=True)
            words.append(ptx.e4m3_of_f16(*(ptx.multiply_16("float16", half, pairs[i % 2]) for half in halves)))
        return words


@dataclass(frozen=True)
class ThreadSums:
    """Output sums of one MMA thread in shared memory, in bf16 vectors of eight, interleaved with those of other
    threads. The rounding error goes back into the accumulator in registers: nothing is lost, at half the traffic of
    fp32.
    """

    layout: MmaFragmentLayout
    address: Int32
    vectors: int
    pitch: int

    @classmethod
    def of(cls, tile: Fp8Tile, address: Int32) -> "ThreadSums":
        thread = ptx.thread_index() - Int32(128)
        memory = tile.memory
        return cls(tile.output_layout, address + thread * 16, memory.head_dim_vo // 16, 2 * 16 * memory.tile.rows)

    def clear(self) -> None:
        for i in range(self.vectors):
            ptx.st_shared_v4(self.address, i * self.pitch, [Int32(0) for _ in range(4)])

    def add(self, out: list[Float32]) -> list[Float32]:
        """Adds `out` to the sums; returns the rounding errors, from which the accumulator continues."""
        rest = []
        for i in range(self.vectors):
            rest += self.write(i, [x + y for x, y in zip(self.read(i), out[8 * i : 8 * i + 8], strict=True)])
        return rest

    def scale(self, out: list[Float32], factors: list[Float32]) -> list[Float32]:
        """Scales the sums and `out`; returns `out` plus the rounding errors of the sums."""
        scaled = []
        for i in range(self.vectors):
            by_register = [factors[self.layout.slot_of(register)] for register in range(8 * i, 8 * i + 8)]
            rest = self.write(i, [x * factor for x, factor in zip(self.read(i), by_register, strict=True)])
            scaled += [
                ptx.fma(x, factor, error)
                for x, factor, error in zip(out[8 * i : 8 * i + 8], by_register, rest, strict=True)
            ]
        return scaled

    def plus(self, out: list[Float32]) -> list[Float32]:
        return [x + y for i in range(self.vectors) for x, y in zip(self.read(i), out[8 * i : 8 * i + 8], strict=True)]

    def read(self, i: int) -> list[Float32]:
        return ptx.unpack_pairs("bfloat16", ptx.ld_shared_v4(self.address, i * self.pitch))

    def write(self, i: int, values: list[Float32]) -> list[Float32]:
        words = ptx.pack_pairs("bfloat16", values)
        ptx.st_shared_v4(self.address, i * self.pitch, words)
        return [x - y for x, y in zip(values, ptx.unpack_pairs("bfloat16", words), strict=True)]


@dataclass(frozen=True)
class Fp8Softmax(E4m3Softmax):
    """Softmax whose sums show whether an element of P exceeds e4m3's range."""

    p_log2 = 3.0

    def headroom(self, total: list[Float32]) -> list[Float32]:
        """Exponents by which the rows of P may grow, from the running sums of all tiles so far."""
        return [self.raised_by(Float32(PEAK_LOG2) - ptx.log2(self.layout.reduce(ptx.fmax, x))) for x in total]

    @property
    def sum_limit(self) -> float:
        """The largest sum whose elements of P e4m3 holds."""
        return SUM_LIMIT


@dataclass(frozen=True)
class VTranspose:
    """Transpose of V tiles from [key][d], as TMA writes them, to [d][key], by the transform warps.

    ldmatrix.trans of 16-bit elements gives a lane two adjacent dimensions of two adjacent keys; four such matrices hold
    32 keys. Even and odd dimensions go to lines eight apart, so that the lines of a matrix differ in bank.
    """

    memory: Fp8Memory
    warp: Int32
    lane: Int32
    warps: int
    barrier: int  # named barrier of these warps

    @cute.jit
    def run(self, source: Int32, target: Int32) -> None:
        """Transposes a tile in blocks of 32 keys by 64 dimensions."""
        memory, pitch = self.memory, self.memory.key_line
        halves, inner = memory.transposed_dims // 64, self.lane & 7
        read = source + self.lane * LINE
        odd, second = (self.lane >> 3) & 1, self.lane >> 4  # of the matrix whose line this lane addresses
        write = target + (odd * 8 + inner) * pitch
        in_line, swizzle = pitch // 32, inner >> (LINE // pitch - 1)
        for piece in cutlass.range(self.warp, memory.tile.cols // 32 * halves, self.warps, unroll=1):
            keys, half = piece // halves, piece % halves
            line = read + keys * (32 * LINE) + (half >> 1) * (memory.tile.cols * LINE)
            read_at = line + ((inner ^ ((half & 1) << 2)) << 4)
            line = write + keys // in_line * (memory.transposed_dims * pitch) + half * (64 * pitch)
            write_at = line + (((swizzle ^ second) ^ ((keys & (in_line - 1)) << 1)) << 4)
            loaded = [ptx.ldmatrix_x4(read_at ^ Int32(i << 4), 0, transpose=True) for i in range(4)]
            for i, (a, b, c, d) in enumerate(loaded):
                even = [ptx.permute(a, b, 0x6420), ptx.permute(c, d, 0x6420)]
                uneven = [ptx.permute(a, b, 0x7531), ptx.permute(c, d, 0x7531)]
                sm90.stmatrix_x4(write_at, i * (16 * pitch), [even[0], uneven[0], even[1], uneven[1]])

    @cute.jit
    def clear(self, source: Int32, first: Int32) -> None:
        """Zeroes keys from `first`: they belong to another request or to none, and 0 * NaN is not 0."""
        cols = self.memory.tile.cols
        thread = self.warp * 32 + self.lane
        for chunk in cutlass.range(thread, (cols - first) * (LINE // 16), 32 * self.warps, unroll=1):
            for column in cutlass.range_constexpr(self.memory.vo_columns):
                at = source + first * LINE + chunk * 16
                ptx.st_shared_v4(at, column * cols * LINE, [Int32(0) for _ in range(4)])
        tma.named_sync(Int32(self.barrier), 32 * self.warps)


@dataclass(frozen=True)
class Fp8Store(WarpgroupStore):
    """Store of outputs of fp8 products. Blocks 2 b and 2 b + 1 hold even and odd dimensions: a lane has four adjacent
    ones of every 16.
    """

    def adjacent(self, values: list[Float32]) -> list[list[Float32]]:
        return [[values[i], values[i + 2], values[i + 1], values[i + 3]] for i in range(0, len(values), 4)]

    @cute.jit
    def store_f32(self, row: Int32, values: list[Float32]) -> None:
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.quad_lane * 16)
            for i, four in enumerate(self.adjacent(values)):
                ptx.st_global_v4_f32(address, i * 64, four)

    @cute.jit
    def store_chunks(self, row: Int32, values: list[Float32]) -> None:
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.quad_lane * 8)
            for i, four in enumerate(self.adjacent(values)):
                ptx.st_global_v2(address, i * 32, ptx.pack_pairs(self.target.dtype, four))


@dataclass(frozen=True)
class NarrowFp8Store(NarrowStore, Fp8Store):
    """Store of fp8 outputs of fp8 products: words hold adjacent dimensions."""

    def packed(self, values: list[Float32]) -> list[Int32]:
        return [ptx.pack_8(self.target.dtype, four) for four in self.adjacent(values)]

    def in_order(self, words: list[Int32]) -> list[Int32]:
        return words
