"""Merge where every warp has a softmax state of its own, in the layout of mma.sync."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import cluster, ptx, tma
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import shared_memory, warp_index
from cute_attn.kernels.blocks.smem_map import BARRIER_BYTES
from cute_attn.kernels.blocks.softmax import Running
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.formats import Format
from cute_attn.kernels.xqa.parts.merge import VECTOR_WIDTH, Merge, SoftmaxState, merge_states
from cute_attn.kernels.xqa.parts.partition import KvSplit, Segment, Share
from cute_attn.kernels.xqa.parts.softmax import reduce_column
from cute_attn.kernels.xqa.smem import INBOX_BARRIERS, XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec


@dataclass(frozen=True)
class WarpMerge(Merge):
    """Merge of states in registers, which warps publish first."""

    spec: XqaSpec
    memory: XqaMemory
    format: Format
    turn: Int32  # segments before this one that the CTA had

    @staticmethod
    def open(memory: XqaMemory) -> None:
        """Prepare shared memory, before anything else."""

    @property
    def states(self) -> range:
        return range(0, self.spec.warps, self.spec.team)

    def has_columns(self, dim: Int32) -> Boolean | bool:
        return dim < self.spec.warp_dim if self.spec.warp_dim < self.spec.tile_dim else True

    def head_dim(self, dim: Int32) -> Int32:
        return self.team.shifted(dim, self.spec.warp_dim)

    @cute.jit
    def publish(self, running: Running) -> None:
        """Store a warp's outputs as fp32 [row, dim] in the free slots of its ring, dims swizzled by `swizzled_dim`."""
        warp = warp_index()
        lane = cute.arch.thread_idx()[0] & 31
        totals = [reduce_column(lambda a, b: a + b, x) for x in running.total]
        outputs = self.base + warp * self.memory.ring_bytes + self.memory.outputs
        stats = self.base + self.memory.stats + warp * (self.spec.rows * 8)
        maximum = [Float32(0.0) - x for x in running.shift]
        if lane < 4:
            for slot in cutlass.range_constexpr(2 * self.spec.row_blocks):
                row = lane * 2 + (slot // 2 * 8 + slot % 2)
                ptx.st_shared_v2_f32(stats + row * 8, 0, [maximum[slot], totals[slot]])
        if cutlass.const_expr(self.spec.paired):
            if lane >> 4 == (lane >> 1 & 1):  # columns that carry the scales of the block of this lane's rows
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
                at = outputs + row * (self.spec.tile_dim * 4) + self.swizzled_dim(dim, row) * 4
                upper, lower = running.out[i + column], running.out[i + column + 2]
                if distance == 1:
                    ptx.st_shared_v2_f32(at, 0, [upper, lower])
                else:  # row g + 8 differs in bit 3, which the swizzle may flip
                    far = outputs + row * (self.spec.tile_dim * 4) + self.swizzled_dim(dim + distance, row) * 4
                    ptx.st_shared_f32(at, 0, upper)
                    ptx.st_shared_f32(far, 0, lower)

    @property
    def vectors_in_flight(self) -> int:
        crowded = self.spec.warps * (self.spec.ctas + self.spec.guests) > 8  # leaves fewer registers per thread
        return 4 if crowded or self.team.size > 1 else 8


@dataclass(frozen=True)
class WholeMerge(WarpMerge):
    """Merge of segments that one CTA processes alone (`partition.WholeSegments`)."""

    @cute.jit
    def write(self, rows: PackedRows, segment: Segment, share: Share, split: KvSplit) -> None:
        """Write outputs, by all threads. A barrier after `publish` must come before."""
        for item in cutlass.range(self.team.thread(), self.num_vectors(rows), self.column_threads, unroll=1):
            row, dim = self.row_and_dim(item)
            if self.has_columns(dim):
                self.store(rows, row, self.head_dim(dim), self.merge_warps(row, dim))


# --- segments of one warp ---------------------------------------------------------------------------------------------

# A segment that one warp processes alone, or of which it alone has a CTA's part, becomes output rows without other
# warps; where no segment is cut, without barriers of the CTA. Outputs go through the warp's own slots in shared memory,
# from where each lane stores eight dims of a row at once. The factor of a row, for which its sink is read, is found by
# one lane.


STORED_DIMS = 8  # of a row, stored by a lane at once: 16 bytes, or 8 of e4m3


@dataclass(frozen=True)
class HeadMerge(WarpMerge):
    """Outputs of one warp, which `publish` has stored in shared memory."""

    def sync(self) -> None:
        ptx.sync_warp()

    def places(self) -> list[tuple[Int32, Int32]]:
        """Row and dimension of the outputs that this lane stores, `STORED_DIMS` at once."""
        per_row = self.spec.tile_dim // STORED_DIMS
        items = [first + self.team.thread() for first in range(0, self.spec.rows * per_row, 32)]
        return [(item // per_row, item % per_row * STORED_DIMS) for item in items]

    @cute.jit
    def write(self, rows: PackedRows, segment: Segment, share: Share, split: KvSplit) -> None:
        """Write outputs, by the lanes of the warp. `sync` after `publish` must come before."""
        factor = self.finish_row(rows, ptx.minimum(self.team.thread(), Int32(self.spec.rows - 1)))
        places = self.places()
        values = [self.outputs(row, dim) for row, dim in places]
        for i in cutlass.range_constexpr(len(places)):
            row, dim = places[i]
            scale = ptx.shuffle_from(factor, row)
            if self.with_columns(rows.exists(row), dim):
                self.store_values(rows, row, dim, [x * scale for x in values[i]])

    @cute.jit
    def finish_row(self, rows: PackedRows, row: Int32) -> Float32:
        """Store a row's lse; return the factor of its outputs. Lanes beyond the last row repeat it."""
        p = self.p
        maximum, total = self.row_state(row)
        factor, lse = self.finish.row(maximum, total, rows.head(row))
        if isa.all_of([rows.exists(row), self.team.thread() < self.spec.rows, p.lse != Int64(0)]):
            ptx.st_global_f32(rows.lse_address(p.lse, row, p.num_kv_heads * p.group.value), 0, lse)
        return factor

    def row_state(self, row: Int32) -> list[Float32]:
        """Maximum and sum of a row."""
        stats = self.base + self.memory.stats + warp_index() * (self.spec.rows * 8)
        return ptx.ld_shared_v2_f32(stats + row * 8)

    def outputs(self, row: Int32, dim: Int32) -> list[Float32]:
        """Adjacent outputs of a row; the swizzle keeps eight together."""
        ring = self.base + warp_index() * self.memory.ring_bytes
        at = ring + row * (self.spec.tile_dim * 4) + self.swizzled_dim(dim, row) * 4
        return [x for half in (0, 16) for x in ptx.ld_shared_v4_f32(at, self.memory.outputs + half)]


@dataclass(frozen=True)
class EvenMerge(HeadMerge):
    """Merge where other CTAs may have parts of a warp's segment. All warps of a CTA have the same part of theirs: it
    counts arrivals once."""

    def sync_cta(self) -> None:
        ptx.sync_threads()

    @cute.jit
    def write(self, rows: PackedRows, segment: Segment, share: Share, split: KvSplit) -> None:
        """Write outputs, or this warp's partial."""
        if split.whole:
            HeadMerge.write(self, rows, segment, share, split)
        else:
            first = ptx.divide(segment.start, share.size)
            last = ptx.divide(segment.start + segment.request.tiles - 1, share.size)
            self.store_part(rows, self.partial_index(split))
            self.merge_splits(rows, first, last - first + 1)

    @cute.jit
    def store_part(self, rows: PackedRows, partial: Int32) -> None:
        """Store the warp's state as a partial."""
        lane = self.team.thread()
        row = ptx.minimum(lane, Int32(self.spec.rows - 1))
        state = self.row_state(row)
        if cutlass.and_(rows.exists(row), lane < self.spec.rows):
            stats, _ = self.partial_address(partial, row)
            ptx.st_global_v2_f32(stats, 0, state)
        places = self.places()
        for i in cutlass.range_constexpr(len(places)):
            row, dim = places[i]
            values = self.outputs(row, dim)
            if self.with_columns(rows.exists(row), dim):
                self.store_state(partial, row, dim, values)

    def store_state(self, partial: Int32, row: Int32, dim: Int32, values: list[Float32]) -> None:
        """Store adjacent outputs of a row of a partial."""
        _, outputs = self.partial_address(partial, row)
        for first in range(0, STORED_DIMS, 4):
            ptx.st_global_v4_f32(outputs + Int64(dim * 4), 4 * first, values[first : first + 4])


# --- shares of clusters -----------------------------------------------------------------------------------------------

# The CTAs of a cluster send each other their results of a segment, so that each merges a slice of the rows:
#
#     warps -> state of the CTA | slice of every CTA to the CTA that has the slice | wait for its bytes | merge, store
#
# What is sent counts its bytes at a barrier of the CTA that receives it. A barrier of the whole cluster would need a
# fence of the whole GPU before it: 0.6 to 1.1 us on an H100. A CTA that has read its inbox tells the others so in the
# same way, once it has another segment: a word to each, by which they wait before they send again. Two barriers for
# these words take turns, as a CTA may be told of the next segment by one CTA before it is told of this one by another.
#
# Where several clusters share a segment, each CTA leaves its slice in global memory, and of those that have the same
# slice the one that arrives last merges them.


SENT_BYTES = 16 + 8  # of a vector and its statistics
SLICES = 4  # of as many clusters, that a thread loads at once


@dataclass(frozen=True)
class ClusterMerge(WarpMerge):
    """Merge of a segment of a cluster's share (`partition.ClusterShares`)."""

    @staticmethod
    @cute.jit
    def open(memory: XqaMemory) -> None:
        """Prepare the barriers of this CTA's inbox and tell the other CTAs of the cluster."""
        barriers = shared_memory() + memory.inbox_barriers
        if cute.arch.thread_idx()[0] == 0:
            for i in range(INBOX_BARRIERS):
                tma.barrier_init(barriers + BARRIER_BYTES * i, 1)
            tma.fence_barrier_init()
        cluster.arrive_relaxed()

    @cute.jit
    def enter(self, split: KvSplit) -> None:
        """Wait for the other CTAs: nothing may be sent to one that has not opened its inbox. Before all but the first
        segment tell them that the inbox is free again."""
        if self.turn == 0:
            cluster.wait()
        else:
            cta = cute.arch.thread_idx()[0]
            if isa.all_of([split.active, cta < self.spec.cluster_size]):
                turn = self.turn - 1
                other = cluster.in_cta(self.base, cta)
                word = (turn & 1) * self.spec.cluster_size + cluster.rank()
                cluster.store_async(other + self.memory.freed + word * 4, [turn], other + self.freed_barrier(turn))

    @cute.jit
    def collect(self, rows: PackedRows) -> None:
        """Send the vectors of this CTA's state to the CTAs that have them in their slices, and wait for those of all
        CTAs in this one's slice."""
        size, thread, turn = self.spec.cluster_size, cute.arch.thread_idx()[0], self.turn - 1
        inbox, freed = self.base + self.memory.inbox_barriers, self.base + self.freed_barrier(turn)
        if thread == 0:
            tma.barrier_expect(inbox, self.slice_vectors(rows) * (size * SENT_BYTES))
        if turn >= 0:
            if thread == 0:
                tma.barrier_expect(freed, size * 4)
            cluster.barrier_wait(freed, turn >> 1 & 1)
        for item in cutlass.range(thread, self.num_vectors(rows), self.column_threads, unroll=1):
            row, dim = self.row_and_dim(item)
            if self.has_columns(dim):
                self.send(item, self.merge_warps(row, dim))
        cluster.barrier_wait(inbox, self.turn & 1)

    def freed_barrier(self, turn: Int32) -> Int32:
        """Offset of the barrier by which CTAs tell that they have read what they received for segment `turn`."""
        return self.memory.inbox_barriers + BARRIER_BYTES * (1 + (turn & 1))

    @cute.jit
    def merge_splits(self, rows: PackedRows, first: Int32, count: Int32) -> None:
        """Count this CTA as done with its slice, one of `count`. The last merges all, of which it loads several at
        once: they are too few for groups."""
        counter = self.counter_address(first)
        if self.arrive(counter) == count - 1:
            self.reset(counter)
            begin, end = self.vectors(rows)
            for item in cutlass.range(begin + cute.arch.thread_idx()[0], end, self.column_threads, unroll=1):
                row, dim = self.row_and_dim(item)
                if self.has_columns(dim):
                    state = SoftmaxState.empty(VECTOR_WIDTH)
                    for start in cutlass.range(0, count, SLICES, unroll=1):
                        numbers = [start + i for i in range(SLICES)]
                        slices = [(self.partial_of(first + n, n), n < count) for n in numbers]
                        loaded = [self.load_partial(partial, rows, row, dim, exists) for partial, exists in slices]
                        state = merge_states([state, *loaded])
                    self.store(rows, row, dim, state)

    # --- places -----------------------------------------------------------------------------------------------------

    @property
    def share_number(self) -> Int32:
        return cute.arch.block_idx()[1] // self.spec.cluster_size

    def cta_index(self, share: Int32) -> Int32:
        """Linear index of the CTA that has the slice of this one in the cluster that has share number `share`."""
        return super().cta_index(share * self.spec.cluster_size + cluster.rank())

    @property
    def first_vector(self) -> Int32:
        """The first vector of this CTA's slice."""
        return cluster.rank() * self.memory.inbox_vectors

    def vectors(self, rows: PackedRows) -> tuple[Int32 | int, Int32]:
        return self.first_vector, ptx.minimum(self.first_vector + self.memory.inbox_vectors, self.num_vectors(rows))

    def is_first(self, row: Int32, dim: Int32) -> Boolean:
        return cutlass.or_(dim == 0, self.item(row, dim) == self.first_vector)

    def item(self, row: Int32, dim: Int32) -> Int32:
        """Number of a vector of the CTA's state."""
        return row * self.vectors_per_row + dim // VECTOR_WIDTH

    def slice_vectors(self, rows: PackedRows) -> Int32:
        """Number of vectors of this CTA's slice that exist."""
        first, end = self.vectors(rows)
        return self.vectors_below(end) - self.vectors_below(ptx.minimum(first, end))

    def vectors_below(self, item: Int32) -> Int32:
        """Number of vectors before this one that are no padding."""
        in_row, held = item % self.vectors_per_row, self.spec.warp_dim // VECTOR_WIDTH
        return item // self.vectors_per_row * held + ptx.minimum(in_row, Int32(held))

    # --- vectors that are sent --------------------------------------------------------------------------------------

    def send(self, item: Int32, state: SoftmaxState) -> None:
        """Send a vector to the CTA that has it in its slice."""
        vectors = self.memory.inbox_vectors
        to = item // vectors
        place = cluster.rank() * vectors + (item - to * vectors)
        inbox = cluster.in_cta(self.base, to)
        barrier = inbox + self.memory.inbox_barriers
        values = [ptx.bits(x) for x in state.values]
        cluster.store_async(inbox + self.memory.inbox + place * 16, values, barrier)
        stats = [ptx.bits(state.maximum), ptx.bits(state.total)]
        cluster.store_async(inbox + self.memory.inbox_stats + place * 8, stats, barrier)

    def merged(self, row: Int32, dim: Int32) -> SoftmaxState:
        index = self.item(row, dim) - self.first_vector
        return merge_states([self.received(index, cta) for cta in range(self.spec.cluster_size)])

    def received(self, index: Int32, cta: int) -> SoftmaxState:
        """Vector `index` of this CTA's slice, from a CTA of the cluster."""
        place = cta * self.memory.inbox_vectors
        maximum, total = ptx.ld_shared_v2_f32(self.base + index * 8, self.memory.inbox_stats + place * 8)
        values = ptx.ld_shared_v4_f32(self.base + index * 16, self.memory.inbox + place * 16)
        return SoftmaxState(maximum, total, values)
