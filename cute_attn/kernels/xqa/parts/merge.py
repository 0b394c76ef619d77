"""From the accumulators of many warps, and of many CTAs, to output rows.

The warps of a CTA saw different tokens of the same rows: they leave (maximum, sum, outputs) in shared memory, and
threads add up a piece of a row each. If the CTA had only a part of the segment, the result is a partial in global
memory, and the CTA that brings the last part adds up all of them: warp w parts w, w + warps, ..., then the warps'
sums as before. What is added to what depends on lengths alone, not on timing.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.formats import Eight, Four, Sixteen
from cute_attn.kernels.xqa.parts.partition import Part, Segment, Share
from cute_attn.kernels.xqa.parts.softmax import Running, reduce_column
from cute_attn.kernels.xqa.spec import XqaMemory, XqaSpec

WIDTH = 4  # output dimensions of one thread
PIECES = 4  # of a part, that a lane loads at once: 4 x 16 bytes, twice


class Sum(NamedTuple):
    """Of one row: maximum in log2 units, sum of exp2(score - maximum), and WIDTH unnormalised outputs."""

    maximum: Float32
    total: Float32
    values: list[Float32]


def weight(maximum: Float32, new: Float32) -> Float32:
    """Factor that moves a sum from its own maximum to `new`; nothing seen at all: 0 either way."""
    return ptx.exp2(maximum - ptx.select(new == Float32(ptx.NEG_INF), Float32(0.0), new))


def combined(parts: list[Sum]) -> Sum:
    maximum = parts[0].maximum
    for part in parts[1:]:
        maximum = ptx.fmax(maximum, part.maximum)
    total, values = Float32(0.0), [Float32(0.0) for _ in range(WIDTH)]
    for part in parts:
        factor = weight(part.maximum, maximum)
        total = ptx.fma(part.total, factor, total)
        values = [ptx.fma(x, factor, value) for x, value in zip(part.values, values, strict=True)]
    return Sum(maximum, total, values)


@dataclass(frozen=True)
class Merge:
    spec: XqaSpec
    memory: XqaMemory
    format: Sixteen | Eight | Four
    p: Any  # XqaParams
    base: Int32  # shared memory
    finish: FinalEpilogue

    @property
    def pieces(self) -> int:
        return self.spec.head_dim // WIDTH

    # --- warps of a CTA ---------------------------------------------------------------------------------------------

    @cute.jit
    def publish(self, running: Running, warp: Int32) -> None:
        """Outputs as [row, dim] fp32 into the free slot of the warp's ring, see `turned` for the order of dims."""
        lane = cute.arch.thread_idx()[0] & 31
        totals = [reduce_column(lambda a, b: a + b, x) for x in running.total]
        outputs = self.base + warp * self.memory.ring_bytes + self.memory.merge
        stats = self.base + self.memory.stats + warp * (self.memory.rows * 8)
        self.publish_stats(stats, [Float32(0.0) - x for x in running.shift], totals)
        if cutlass.const_expr(self.spec.paired):
            if lane >> 4 == (lane >> 1 & 1):  # columns weighted for the block of this lane's rows
                self.publish_outputs(running, outputs, lane)
        else:
            self.publish_outputs(running, outputs, lane)

    def publish_outputs(self, running: Running, outputs: Int32, lane: Int32) -> None:
        g, t = lane >> 2, lane & 3
        for i in range(0, len(running.out), 4):
            tile, block = i // 4 // self.spec.row_blocks, i // 4 % self.spec.row_blocks
            dim, distance = self.format.output_dim(tile, g)
            for column in (0, 1):
                row = self.spec.row(t * 2 + column) + 8 * block
                at = outputs + row * (self.spec.head_dim * 4) + self.turned(dim, row) * 4
                upper, lower = running.out[i + column], running.out[i + column + 2]
                if distance == 1:
                    ptx.st_shared_v2_f32(at, 0, [upper, lower])
                else:  # g + 8 is at the other side of bit 3
                    far = outputs + row * (self.spec.head_dim * 4) + self.turned(dim + distance, row) * 4
                    isa.st_shared_f32(at, 0, upper)
                    isa.st_shared_f32(far, 0, lower)

    def turned(self, dim: Int32, row: Int32) -> Int32:
        """The lanes of a quad store rows 2t: their dims are turned so that they differ in bank."""
        return dim ^ ((row >> 1 & 3) << 3)

    @cute.jit
    def publish_stats(self, stats: Int32, maximum: list[Float32], totals: list[Float32]) -> None:
        lane = cute.arch.thread_idx()[0] & 31
        if lane < 4:
            for slot in cutlass.range_constexpr(2 * self.spec.row_blocks):
                row = lane * 2 + (slot // 2 * 8 + slot % 2)
                ptx.st_shared_v2_f32(stats + row * 8, 0, [maximum[slot], totals[slot]])

    def warps(self, row: Int32, dim: Int32) -> Sum:
        """Sum of the CTA's warps for one piece of a row."""
        parts = []
        for warp in range(self.spec.warps):
            maximum, total = ptx.ld_shared_v2_f32(self.base + self.memory.stats + row * 8, warp * self.memory.rows * 8)
            at = self.base + row * (self.spec.head_dim * 4) + self.turned(dim, row) * 4
            values = ptx.ld_shared_v4_f32(at, warp * self.memory.ring_bytes + self.memory.merge)
            parts.append(Sum(maximum, total, values))
        return combined(parts)

    # --- output -----------------------------------------------------------------------------------------------------

    @cute.jit
    def write(self, rows: PackedRows, segment: Segment, share: Share, part: Part) -> None:
        """All threads, after a barrier that follows `publish`."""
        thread, threads = cute.arch.thread_idx()[0], 32 * self.spec.warps
        first = isa.divide(segment.start, share.size)
        last = isa.divide(segment.start + segment.request.tiles - 1, share.size)
        first, count = ptx.opaque(first), ptx.opaque(last - first + 1)  # here, not where everybody waits for them
        for item in cutlass.range(thread, self.items(rows), threads, unroll=1):
            row, dim = self.piece(item)
            result = self.warps(row, dim)
            if part.whole:
                self.store(rows, row, dim, result)
            else:
                self.store_partial(self.partial(part), row, dim, result)
        if cutlass.not_(part.whole):
            self.join(rows, first, count)

    def items(self, rows: PackedRows) -> Int32:
        """Pieces of the rows that exist."""
        return ptx.minimum(rows.count - rows.first, Int32(self.spec.rows)) * self.pieces

    @cute.jit
    def store(self, rows: PackedRows, row: Int32, dim: Int32, result: Sum) -> None:
        p, head = self.p, rows.head(row)
        factor, lse = self.finish.row(result.maximum, result.total, head)
        if cutlass.and_(dim == 0, p.lse != Int64(0)):
            index = Int64(rows.start + rows.token(row)) * Int64(p.num_kv_heads * p.group) + Int64(head)
            ptx.st_global_f32(p.lse + index * Int64(4), lse)
        values = [x * factor for x in result.values]
        place = rows.address(p.o, row, p.o_stride_n, p.o_stride_h)
        if cutlass.const_expr(self.spec.out_dtype == "float8_e4m3fn"):
            packed = isa.permute(isa.to_e4m3_pair(*values[:2]), isa.to_e4m3_pair(*values[2:]), 0x5410)
            isa.st_global_b32(place + Int64(dim), packed)
        else:
            pairs = [ptx.pack_16(self.spec.out_dtype, values[i], values[i + 1]) for i in (0, 2)]
            ptx.st_global_v2(place + Int64(dim * 2), 0, pairs)

    # --- parts of a segment -----------------------------------------------------------------------------------------

    def partial(self, part: Part) -> Int32:
        """Every CTA has two places: one for a segment that it starts and another finishes, one for the reverse."""
        return self.cta(cute.arch.block_idx()[1]) * 2 + ptx.select(part.begin == 0, Int32(1), Int32(0))

    def cta(self, share: Int32) -> Int32:
        """Number of the CTA that has a share of this CTA's line."""
        return share * cute.arch.grid_dim()[0] + cute.arch.block_idx()[0]

    def address(self, partial: Int32, row: Int32) -> tuple[Int64, Int64]:
        """Of a row's (maximum, sum), and of its outputs."""
        index = Int64(partial) * Int64(self.spec.rows) + Int64(row)
        ctas = cute.arch.grid_dim()[0] * cute.arch.grid_dim()[1]
        outputs = self.p.partials + Int64(ctas * (2 * self.spec.rows * 8))
        return self.p.partials + index * Int64(8), outputs + index * Int64(self.spec.head_dim * 4)

    @cute.jit
    def store_partial(self, partial: Int32, row: Int32, dim: Int32, result: Sum) -> None:
        stats, outputs = self.address(partial, row)
        if dim == 0:
            ptx.st_global_v2_f32(stats, 0, [result.maximum, result.total])
        ptx.st_global_v4_f32(outputs + Int64(dim * 4), 0, result.values)

    @cute.jit
    def join(self, rows: PackedRows, first: Int32, count: Int32) -> None:
        """Hands in this CTA's part, one of `count` from CTA `first` on; the last to do so merges all and resets the
        counter."""
        thread = cute.arch.thread_idx()[0]
        counter = self.p.counters + Int64(self.cta(first)) * Int64(4)
        ticket = self.base + Int32(self.memory.ticket)
        ptx.sync_threads()
        if thread == 0:
            ptx.st_shared_b32(ticket, 0, isa.arrive(counter))
        ptx.sync_threads()
        if isa.ld_shared_b32(ticket) == count - 1:
            if thread == 0:
                isa.st_global_b32(counter, Int32(0))
            for start in cutlass.range(0, self.items(rows), 32 * self.at_once, unroll=1):
                self.gather(rows, first, count, start)
            ptx.sync_threads()
            threads = 32 * self.spec.warps
            for item in cutlass.range(thread, self.items(rows), threads, unroll=1):
                row, dim = self.piece(item)
                self.store(rows, row, dim, self.warps(row, dim))

    @property
    def at_once(self) -> int:
        crowded = self.spec.warps * (self.spec.ctas + self.spec.guests) > 8  # then there are fewer registers
        pieces = PIECES if crowded else 2 * PIECES
        return min(pieces, self.spec.rows * self.pieces // 32)

    @cute.jit
    def gather(self, rows: PackedRows, first: Int32, count: Int32, start: Int32) -> None:
        """One warp's parts of 32 * at_once pieces, from piece `start` on, added up in its slot in shared memory."""
        thread = cute.arch.thread_idx()[0]
        warp, lane = thread >> 5, thread & 31
        nothing = Sum(Float32(ptx.NEG_INF), Float32(0.0), [Float32(0.0) for _ in range(WIDTH)])
        sums = [nothing for _ in range(self.at_once)]
        places = [self.piece(start + (lane + 32 * i)) for i in range(self.at_once)]
        for index in cutlass.range(warp, count, self.spec.warps, unroll=2):
            partial = self.cta(first + index) * 2 + ptx.select(index == 0, Int32(1), Int32(0))
            loaded = [self.load_partial(partial, rows, row, dim) for row, dim in places]
            sums = [combined([old, new]) for old, new in zip(sums, loaded, strict=True)]
        stats = self.base + self.memory.stats + warp * (self.memory.rows * 8)
        outputs = self.base + warp * self.memory.ring_bytes + self.memory.merge
        for i in cutlass.range_constexpr(self.at_once):
            row, dim = places[i]
            ptx.st_shared_v4_f32(outputs + (row * self.spec.head_dim + self.turned(dim, row)) * 4, 0, sums[i].values)
            if dim == 0:
                ptx.st_shared_v2_f32(stats + row * 8, 0, [sums[i].maximum, sums[i].total])

    def piece(self, index: Int32) -> tuple[Int32, Int32]:
        return index // self.pieces, index % self.pieces * WIDTH

    def load_partial(self, partial: Int32, rows: PackedRows, row: Int32, dim: Int32) -> Sum:
        """Rows that do not exist have no weight."""
        stats, outputs = self.address(partial, row)
        exists = rows.exists(row)
        maximum, total = isa.ld_l2_if(exists, stats, 2)
        maximum = ptx.select(exists, maximum, Float32(ptx.NEG_INF))
        return Sum(maximum, total, isa.ld_l2_if(exists, outputs + Int64(dim * 4), 4))
