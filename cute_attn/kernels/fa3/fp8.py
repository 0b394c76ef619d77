"""Hopper kernel for q, k and v in fp8: twice the products per clock, for operands contiguous along the sum (K-major).

V is not, so three transform warps in the producer's warpgroup transpose its tiles in shared memory:

    producer          K0 Q V0 K1 V1 K2 V2 ...
    transform warps        V0'   V1'   V2' ...
    MMA warpgroup     S0 | S1 , O += P0 V0' , softmax 1 | S2 , O += P1 V1' , softmax 2 | ...

An fp8 product accumulates in 14 bits and truncates: a sum over many keys comes out too small. So after every few tiles,
O is promoted: added to a sum in shared memory, and restarted.

In the A operand a lane holds four adjacent columns; in the accumulator it holds two of one block of eight and two of
the next. No registers are shuffled: the columns of P are permuted keys. `VTransposeWarps` write V in their order.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx, sm90, tma
from cute_attn.kernels.blocks.fragment_store import WarpgroupStore
from cute_attn.kernels.blocks.masks import BandMask
from cute_attn.kernels.blocks.persistent_params import AnyParams, PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, SmemRings
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.scores import MIN_SCALE, RowScales, Scores, row_scale
from cute_attn.kernels.blocks.softmax import P_DTYPE, P_MAX, PEAK_LOG2, E4m3Softmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.blocks.transform_warps import OperandState, TransformWarps, WarpLane
from cute_attn.kernels.fa3.kernel import Fa3Program
from cute_attn.kernels.fa3.mainloop import MmaWarpgroups, MmaWork, State
from cute_attn.kernels.fa3.parts.wgmma import (
    WARPGROUP_ROWS,
    AnyLanes,
    RematerializedLanes,
    WarpgroupLanes,
    WarpgroupTile,
)
from cute_attn.kernels.fa3.smem import Fp8Memory
from cute_attn.kernels.formats import LINE

TRANSPOSE_BARRIER = 9  # named barrier of the transform warps
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
            scaled = (ptx.multiply_16("float16", half, pairs[i % 2]) for half in halves)
            words.append(ptx.pack_8_of_f16(P_DTYPE, *scaled))
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


class VTransposeWarps(TransformWarps):
    """Transform warps that transpose V tiles from [key][d], as TMA writes them, to [d][key].

    ldmatrix.trans of 16-bit elements gives a lane two adjacent dimensions of two adjacent keys; four such matrices hold
    32 keys. Even and odd dimensions go to lines eight apart, so that the lines of a matrix differ in bank.
    """

    memory: Fp8Memory

    @cute.jit
    def transform_query(
        self, rings: SmemRings, place: WarpLane, at: PipelineState, order: cutlass.Constexpr, valid: Int32
    ) -> Any:
        for step in cutlass.range(0, order.total, unroll=1):
            at = self.make_operand(
                rings,
                place,
                "v",
                OperandState(at, at),
                lambda step=step: (cutlass.and_(step == 0, valid < self.spec.tile.cols), valid),
            ).operand
        return at

    @cute.jit
    def convert(self, place: WarpLane, operand: cutlass.Constexpr, source: Int32, target: Int32) -> None:
        """Transposes a tile in blocks of 32 keys by 64 dimensions."""
        memory, pitch = self.memory, self.memory.key_line
        halves, inner = memory.transposed_dims // 64, place.lane & 7
        read = source + place.lane * LINE
        odd, second = (place.lane >> 3) & 1, place.lane >> 4  # of the matrix whose line this lane addresses
        write = target + (odd * 8 + inner) * pitch
        in_line, swizzle = pitch // 32, inner >> (LINE // pitch - 1)
        for piece in cutlass.range(place.warp, memory.tile.cols // 32 * halves, self.warps, unroll=1):
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
    def clear(self, place: WarpLane, operand: cutlass.Constexpr, source: Int32, first: Int32) -> None:
        cols = self.memory.tile.cols
        thread = place.warp * 32 + place.lane
        for chunk in cutlass.range(thread, (cols - first) * (LINE // 16), 32 * self.warps, unroll=1):
            for column in cutlass.range_constexpr(self.memory.vo_columns):
                at = source + first * LINE + chunk * 16
                ptx.st_shared_v4(at, column * cols * LINE, [Int32(0) for _ in range(4)])
        tma.named_sync(Int32(TRANSPOSE_BARRIER), 32 * self.warps)


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
            address = self.target.row(self.rows, row) + Int64(self.lanes.quad_lane * 16)
            for i, four in enumerate(self.adjacent(values)):
                ptx.st_global_v4_f32(address, i * 64, four)

    @cute.jit
    def store_chunks(self, row: Int32, values: list[Float32]) -> None:
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.lanes.quad_lane * 8)
            for i, four in enumerate(self.adjacent(values)):
                ptx.st_global_v2(address, i * 32, ptx.pack_pairs(self.target.dtype, four))


@dataclass(frozen=True)
class NarrowFp8Store(Fp8Store):
    """Store of fp8 outputs of fp8 products: words hold adjacent dimensions."""

    store_chunks = WarpgroupStore.store_chunks

    def packed(self, values: list[Float32]) -> list[Int32]:
        return [ptx.pack_8(self.target.dtype, four) for four in self.adjacent(values)]


# --- the kernel -------------------------------------------------------------------------------------------------------


# Keys that the tensor cores accumulate between promotions. Values of mean 2 and deviation 1 come out too small by 1.0 %
# with 768, by 0.4 % with 384, 2.4 % with 1536, 5 % with 3072; of mean 0.5 by 0.3, 0.1, 0.8 and 1.9 %.
PROMOTION_KEYS = 768
SIGNS = 0x80808080 - (1 << 32)


class Fp8Rings(SmemRings):
    """Rings that compute the address of a record at every use: no register is free to hold it in between."""

    def record(self, q: PipelineState) -> Int32:
        return super().record(PipelineState(ptx.opaque(q.index_phase)))


class Fp8MmaWarpgroups(MmaWarpgroups):
    """MMA warpgroups that promote O."""

    memory: Fp8Memory
    tile: Fp8Tile
    store_type, narrow_store_type = Fp8Store, NarrowFp8Store

    @cute.jit
    def mainloop(self, rings: SmemRings, mma: cutlass.Constexpr, k: PipelineState) -> Any:
        self.sums(rings).clear()
        step0 = mma.skipped + 1
        masked, total = ptx.maximum(mma.order.masked, step0), mma.order.total
        state = self.first_kv_tile(rings, mma, k)
        state = self.promoted_steps(rings, mma, state, step0, masked, True)
        if cutlass.const_expr(self.spec.mask != "packed"):  # all tiles of a packed mask are masked
            state = self.promoted_steps(rings, mma, state, masked, total, False)
        return state

    @cute.jit
    def promoted_steps(
        self,
        rings: SmemRings,
        mma: cutlass.Constexpr,
        state: cutlass.Constexpr,
        begin: Int32,
        end: Int32,
        masked: cutlass.Constexpr,
    ) -> Any:
        """Processes the kv tiles of steps [begin, end), with a promotion after every `PROMOTION_KEYS` keys."""
        order, rest = mma.order, begin
        if cutlass.const_expr(not masked or self.spec.mask == "packed"):  # other masks have few masked tiles
            tiles = PROMOTION_KEYS // self.spec.tile.cols
            rest = begin + (end - begin) // tiles * tiles
            for first in cutlass.range(begin, rest, tiles, unroll=1):
                for step in cutlass.range(first, first + tiles, unroll=1):
                    state = self.step(rings, mma, state, order.at(step) if masked else order.full_at(step), masked)
                state = self.promote(rings, mma, state)
        for step in cutlass.range(rest, end, unroll=1):
            state = self.step(rings, mma, state, order.at(step) if masked else order.full_at(step), masked)
        return state

    @cute.jit
    def promote(self, rings: SmemRings, mma: cutlass.Constexpr, state: cutlass.Constexpr) -> Any:
        """Adds O to the sums in shared memory. Rows with small sums, which are dominated by one peak, are raised in the
        range of e4m3, so that probabilities far below the peak no longer underflow.
        """
        out = self.sums(rings).add(state.out)
        exponents = mma.softmax.headroom(state.total)
        p, shift, total = state.p, state.shift, state.total
        if cute.arch.vote_any_sync(cutlass.or_(*(exponent > Float32(0.0) for exponent in exponents))):
            factors = [ptx.exp2(exponent) for exponent in exponents]
            out = self.rescale_output(rings, out, factors)
            p = self.tile.scaled(p, factors)
            shift = [x + exponent for x, exponent in zip(shift, exponents, strict=True)]
            total = [x * factor for x, factor in zip(total, factors, strict=True)]
        return State(out, p, shift, total, state.k)

    def rescale_output(self, rings: Any, out: list[Float32], factors: list[Float32]) -> list[Float32]:
        return self.sums(rings).scale(out, factors)

    def last_output(self, rings: Any, mma: MmaWork, state: State) -> list[Float32]:
        return self.sums(rings).plus(super().last_output(rings, mma, state))

    def sums(self, rings: Any) -> ThreadSums:
        return ThreadSums.of(self.tile, rings.scratch["sums"])


class Fp8Program(Fa3Program):
    """Hopper kernel for q, k and v in fp8."""

    memory: Fp8Memory
    tile: Fp8Tile
    tile_type = Fp8Tile
    rings_type = Fp8Rings
    mma_type = Fp8MmaWarpgroups
    transform_type = VTransposeWarps

    def softmax(self, p: PersistentParams, work: QueryTile, lanes: WarpgroupLanes, scales: list[Float32]) -> Fp8Softmax:
        scales = [Float32(ptx.LOG2E)] * 2 if self.spec.scores else self.row_scales(p, work, lanes)
        return Fp8Softmax(self.tile.scores_layout, scales)

    def scale_step(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes, scales: list[Float32]) -> RowScales:
        if isinstance(lanes, RematerializedLanes):
            return RowScales(self.tile.scores_layout, lambda: self.row_scales(p, work, lanes))
        scales = self.row_scales(p, work, lanes)
        return RowScales(self.tile.scores_layout, lambda: scales)

    def scores(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes, scales: list[Float32]) -> Scores:
        return super().scores(p, work, RematerializedLanes() if self.spec.mask == "packed" else lanes, scales)

    def mask(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes) -> BandMask:
        return super().mask(p, work, RematerializedLanes() if self.spec.mask == "packed" else lanes)

    def row_scales(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes) -> list[Float32]:
        """Returns the scales of scores, positive because `prepare_q` flips rows of negative scale."""
        rows, scales = work.rows(p), []
        for slot in self.tile.scores_layout.slots:
            scale = row_scale(p, work, rows.head(lanes.row(slot)))
            scales.append(ptx.fmax(ptx.magnitude(scale), Float32(MIN_SCALE)))
        return scales

    @cute.jit
    def prepare_q(
        self, p: AnyParams, work: cutlass.Constexpr, lanes: WarpgroupLanes, q_rows: Int32, scale: Float32
    ) -> list[Float32]:
        """Flips the sign of q rows whose scale is negative, since softmax needs positive scales. wgmma reads the 16
        rows of a warp for that warp alone, so a warp barrier suffices.
        """
        row = lanes.warp * 16 + lanes.lane // 2
        negative = row_scale(p, work, work.rows(p).head(lanes.warpgroup * WARPGROUP_ROWS + row)) < Float32(0.0)
        if cute.arch.vote_any_sync(negative):
            if negative:
                half = q_rows + row * LINE + lanes.lane % 2 * (LINE // 2)
                for column in cutlass.range_constexpr(self.memory.qk_columns):
                    for i in cutlass.range_constexpr(4):
                        offset = column * self.spec.tile.rows * LINE + 16 * i
                        words = ptx.ld_shared_v4(half, offset)
                        ptx.st_shared_v4(half, offset, [word ^ Int32(SIGNS) for word in words])
            tma.fence_async()
            ptx.sync_warp()
        return []  # softmax and scores load the scales of their rows
