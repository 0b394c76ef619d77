"""From accumulators to global memory: normalisation, log-sum-exp, the merge of warps that shared rows, stores."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.mma import Lanes, WarpTile
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.smem import further, swizzled
from cute_attn.kernels.blocks.softmax import Running, reduce_quad


class RowStats(NamedTuple):
    """Per row slot: maximum in log2 units and sum of exp2(score - maximum) over everything seen."""

    maximum: list[Float32]
    total: list[Float32]


def add_sink(maximum: Float32, total: Float32, sink: Float32) -> tuple[Float32, Float32, Float32]:
    """One more term exp(sink) in the denominator: (new maximum, new total, factor for what was summed before)."""
    term = sink * Float32(ptx.LOG2E)
    new = ptx.fmax(maximum, term)
    anchor = ptx.select(new == ptx.NEG_INF, Float32(0.0), new)
    factor = ptx.exp2(maximum - anchor)
    return new, ptx.fma(total, factor, ptx.exp2(term - anchor)), factor


def normaliser(total: Float32) -> Float32:
    """1 / total; 0 where nothing was seen, so that empty rows give zeros."""
    return ptx.select(total == Float32(0.0), Float32(0.0), ptx.reciprocal(total))


def log_sum_exp(maximum: Float32, total: Float32) -> Float32:
    """Base 2; -inf where nothing was seen (log2 of 0 is -inf, and the maximum is -inf too)."""
    return maximum + ptx.log2(total)


@dataclass(frozen=True)
class Finish:
    """What the final writer of a row applies: sink (address of fp32 per head, or 0), v scale, and the unit of lse."""

    sinks: Int64
    v_scale: Float32
    lse_scale: Float32

    @cute.jit
    def row(self, maximum: Float32, total: Float32, head: Int32) -> tuple[Float32, Float32]:
        """(factor for the row's accumulator, lse)."""
        factor = self.v_scale
        if self.sinks != Int64(0):
            sink = ptx.ld_global_f32(self.sinks + Int64(head) * Int64(4))
            maximum, total, kept = add_sink(maximum, total, sink)
            factor = factor * kept
        return factor * normaliser(total), log_sum_exp(maximum, total) * self.lse_scale


class Unfinished:
    """What the writer of a split's partial applies: nothing but the split's own sum."""

    def row(self, maximum: Float32, total: Float32, head: Int32) -> tuple[Float32, Float32]:
        return normaliser(total), log_sum_exp(maximum, total)


@dataclass(frozen=True)
class Target:
    """Output rows [token, head] of 16-bit or fp32 elements, and their lse (or 0)."""

    dtype: str
    o: Int64
    token_stride: Int64
    head_stride: Int64
    lse: Int64
    num_heads: Int32

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def row(self, rows: PackedRows, row: Int32) -> Int64:
        return rows.address(self.o, row, self.token_stride, self.head_stride)

    @cute.jit
    def store_lse(self, rows: PackedRows, row: Int32, value: Float32) -> None:
        if self.lse != Int64(0):
            index = Int64(rows.start + rows.token(row)) * Int64(self.num_heads) + Int64(rows.head(row))
            ptx.st_global_f32(self.lse + index * Int64(4), value)

    def store_8(self, address: Int64, values: list[Float32]) -> None:
        """Eight neighbouring elements of a row."""
        if self.dtype == "float32":
            store_8_f32(address, values)
        else:
            packed = [ptx.pack_16(self.dtype, values[i], values[i + 1]) for i in (0, 2, 4, 6)]
            ptx.st_global_v4(address, 0, packed)


@dataclass(frozen=True)
class Partials:
    """fp32 rows of a tile in the slot of a work item; `first` is the slot's row 0 of this kv head."""

    dtype: ClassVar[str] = "float32"
    element_bytes: ClassVar[int] = 4
    o: Int64
    lse: Int64
    first: Int64
    head_dim: int

    def row(self, rows: PackedRows, row: Int32) -> Int64:
        return self.o + (self.first + Int64(row)) * Int64(self.head_dim * 4)

    def store_lse(self, rows: PackedRows, row: Int32, value: Float32) -> None:
        ptx.st_global_f32(self.lse + (self.first + Int64(row)) * Int64(4), value)

    def store_8(self, address: Int64, values: list[Float32]) -> None:
        store_8_f32(address, values)


def store_8_f32(address: Int64, values: list[Float32]) -> None:
    ptx.st_global_v4_f32(address, 0, values[:4])
    ptx.st_global_v4_f32(address, 16, values[4:])


@dataclass(frozen=True)
class WarpRows:
    """Epilogue of warps that own their rows: normalise in registers, store."""

    tile: WarpTile
    lanes: Lanes
    rows: PackedRows
    target: Target | Partials
    finish: Finish | Unfinished
    base: Int32  # shared memory

    @cute.jit
    def write(self, out: list[Float32], stats: RowStats) -> None:
        memory = self.tile.memory
        factors = []
        for slot in cutlass.range_constexpr(self.tile.row_slots):
            row = self.lanes.row(memory, slot)
            factor, lse = self.finish.row(stats.maximum[slot], stats.total[slot], self.rows.head(row))
            factors.append(factor)
            if cutlass.and_(self.lanes.lane % 4 == 0, self.rows.exists(row)):
                self.target.store_lse(self.rows, row, lse)
        if cutlass.const_expr(self.target.dtype == "float32"):
            self.store_pairs(out, factors)
        else:
            self.store_staged(out, factors)

    @cute.jit
    def store_pairs(self, out: list[Float32], factors: list[Float32]) -> None:
        """fp32: a quad's pairs are 32 contiguous bytes already."""
        for slot in cutlass.range_constexpr(self.tile.row_slots):
            row = self.lanes.row(self.tile.memory, slot)
            if self.rows.exists(row):
                address = self.target.row(self.rows, row) + Int64(self.lanes.lane % 4 * 8)
                for d in cutlass.range_constexpr(self.tile.d_blocks):
                    i = 4 * ((slot // 2) * self.tile.d_blocks + d) + 2 * (slot % 2)
                    pair = [out[i] * factors[slot], out[i + 1] * factors[slot]]
                    ptx.st_global_v2_f32(address, d * 32, pair)

    @cute.jit
    def store_staged(self, out: list[Float32], factors: list[Float32]) -> None:
        """16 bit: through this warp's own rows of the Q tile, so that rows leave in 16-byte pieces.

        The CTA barrier is for tiles without any kv tile: there, no other one stands between the copies of Q, which
        other warps made, and these stores.
        """
        memory = self.tile.memory
        pitch, chunks = memory.qk_pitch, memory.head_dim_vo // 8
        ptx.sync_threads()
        for slot in cutlass.range_constexpr(self.tile.row_slots):
            address = self.base + swizzled(self.lanes.row(memory, slot), Int32(0), pitch) + self.lanes.lane % 4 * 4
            for d in cutlass.range_constexpr(self.tile.d_blocks):
                i = 4 * ((slot // 2) * self.tile.d_blocks + d) + 2 * (slot % 2)
                pair = ptx.pack_16(self.target.dtype, out[i] * factors[slot], out[i + 1] * factors[slot])
                place, offset = further(address, d)
                ptx.st_shared_b32(place, offset, pair)
        ptx.sync_warp()
        rows_per_warp = memory.tile.rows // memory.tile.warps_rows
        first = self.lanes.warp_row * rows_per_warp + self.lanes.lane // 8
        for i in cutlass.range(0, rows_per_warp, 4, unroll=1):
            row = first + i
            if self.rows.exists(row):
                self.store_row(row, chunks)

    @cute.jit
    def store_row(self, row: Int32, chunks: cutlass.Constexpr) -> None:
        """Eight threads write a staged row, a line of 128 bytes at a time."""
        chunk = self.lanes.lane % 8
        source = self.base + swizzled(row, chunk, self.tile.memory.qk_pitch)
        address = self.target.row(self.rows, row) + Int64(chunk * 16)
        for line in cutlass.range_constexpr((chunks + 7) // 8):
            if chunk < chunks - line * 8:
                ptx.st_global_v4(address, line * 128, ptx.ld_shared_v4(source, line * 128))


@dataclass(frozen=True)
class MergedWarps:
    """Epilogue of warps that saw different kv columns of the same rows: merge through the drained K/V ring."""

    tile: WarpTile
    lanes: Lanes
    rows: PackedRows
    target: Target | Partials
    finish: Finish | Unfinished
    base: Int32

    @cute.jit
    def write(self, out: list[Float32], stats: RowStats) -> None:
        self.publish(out, stats)
        ptx.sync_threads()
        chunks = self.tile.memory.head_dim_vo // 8
        lanes = 1 << (chunks - 1).bit_length()
        threads = self.tile.memory.tile.threads
        thread = cute.arch.thread_idx()[0]
        chunk = thread % lanes
        for i in cutlass.range(0, self.tile.memory.tile.rows, threads // lanes, unroll=1):
            row = thread // lanes + i
            if cutlass.and_(row < self.tile.memory.tile.rows, self.rows.exists(row)):
                self.write_row(row, chunk, chunks)

    @cute.jit
    def publish(self, out: list[Float32], stats: RowStats) -> None:
        """Every warp's row stats and unnormalised outputs to shared memory."""
        memory = self.tile.memory
        ptx.sync_threads()  # the ring and Q are read no more
        stats_at = self.base + self.lanes.warp_col * (memory.tile.rows * 8)
        out_at = self.base + memory.merge_outputs + self.lanes.warp_col * (memory.tile.rows * memory.merge_pitch)
        for slot in cutlass.range_constexpr(self.tile.row_slots):
            row = self.lanes.row(memory, slot)
            if self.lanes.lane % 4 == 0:
                ptx.st_shared_v2_f32(stats_at + row * 8, 0, [stats.maximum[slot], stats.total[slot]])
            address = out_at + row * memory.merge_pitch + self.lanes.lane % 4 * 8
            for d in cutlass.range_constexpr(self.tile.d_blocks):
                i = 4 * ((slot // 2) * self.tile.d_blocks + d) + 2 * (slot % 2)
                ptx.st_shared_v2_f32(address, d * 32, out[i : i + 2])

    @cute.jit
    def write_row(self, row: Int32, chunk: Int32, chunks: cutlass.Constexpr) -> None:
        memory = self.tile.memory
        shape = memory.tile
        parts = [ptx.ld_shared_v2_f32(self.base + row * 8, w * shape.rows * 8) for w in range(shape.warps_cols)]
        maximum = parts[0][0]
        for part in parts[1:]:
            maximum = ptx.fmax(maximum, part[0])
        anchor = ptx.select(maximum == ptx.NEG_INF, Float32(0.0), maximum)
        weights = [ptx.exp2(part[0] - anchor) for part in parts]
        total = Float32(0.0)
        for part, weight in zip(parts, weights, strict=True):
            total = ptx.fma(part[1], weight, total)
        factor, lse = self.finish.row(maximum, total, self.rows.head(row))
        if chunk == 0:
            self.target.store_lse(self.rows, row, lse)
        if chunk < chunks:
            values = [Float32(0.0) for _ in range(8)]
            address = self.base + memory.merge_outputs + row * memory.merge_pitch + chunk * 32
            for w, weight in enumerate(weights):
                offset = w * shape.rows * memory.merge_pitch
                eight = ptx.ld_shared_v4_f32(address, offset) + ptx.ld_shared_v4_f32(address, offset + 16)
                values = [ptx.fma(x, weight, v) for x, v in zip(eight, values, strict=True)]
            place = self.target.row(self.rows, row) + Int64(chunk * (8 * self.target.element_bytes))
            self.target.store_8(place, [v * factor for v in values])


def row_stats(running: Running) -> RowStats:
    """Stats of whole rows: sums were kept per thread of a quad, maxima negated."""
    maximum = [Float32(0.0) - shift for shift in running.shift]
    return RowStats(maximum, [reduce_quad(lambda a, b: a + b, x) for x in running.total])
