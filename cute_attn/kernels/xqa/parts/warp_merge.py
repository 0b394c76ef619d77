"""Merge where every warp has a softmax state of its own, in the layout of mma.sync."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import cluster, ptx, tma
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import shared_memory, warp_index
from cute_attn.kernels.blocks.softmax import Running
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.formats import Format
from cute_attn.kernels.xqa.parts.merge import VECTOR_WIDTH, Merge, SoftmaxState, merge_states
from cute_attn.kernels.xqa.parts.partition import KvSplit, Segment, Share
from cute_attn.kernels.xqa.parts.softmax import reduce_column
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec


@dataclass(frozen=True)
class WarpMerge(Merge):
    """Merge of states in registers, which warps publish first."""

    spec: XqaSpec
    memory: XqaMemory
    format: Format

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
    def publish(self, running: Running, warp: Int32) -> None:
        """Store a warp's outputs as fp32 [row, dim] in the free slots of its ring, dims swizzled by `swizzled_dim`."""
        lane = cute.arch.thread_idx()[0] & 31
        totals = [reduce_column(lambda a, b: a + b, x) for x in running.total]
        outputs = self.base + warp * self.memory.ring_bytes + self.memory.outputs
        stats = self.base + self.memory.stats + warp * (self.spec.rows * 8)
        self.publish_stats(stats, [Float32(0.0) - x for x in running.shift], totals)
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

    @cute.jit
    def publish_stats(self, stats: Int32, maximum: list[Float32], totals: list[Float32]) -> None:
        lane = cute.arch.thread_idx()[0] & 31
        if lane < 4:
            for slot in cutlass.range_constexpr(2 * self.spec.row_blocks):
                row = lane * 2 + (slot // 2 * 8 + slot % 2)
                ptx.st_shared_v2_f32(stats + row * 8, 0, [maximum[slot], totals[slot]])

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
        self.store_rows(rows)


# --- segments of one warp ---------------------------------------------------------------------------------------------

# A segment that one warp processes alone, or of which it alone has a CTA's part, becomes output rows without other
# warps; where no segment is cut, without barriers of the CTA. Outputs go through the warp's own slots in shared memory,
# from where each lane stores eight dims of a row at once. The factor of a row, for which its sink is read, is found by
# one lane.


STORED_DIMS = 8  # of a row, stored by a lane at once: 16 bytes, or 8 of e4m3


@dataclass(frozen=True)
class HeadMerge(WholeMerge):
    """Outputs of one warp, which `publish` has stored in shared memory."""

    def sync(self) -> None:
        ptx.sync_warp()

    def places(self) -> list[tuple[Int32, Int32]]:
        """Row and dimension of the outputs that this lane stores, `STORED_DIMS` at once."""
        per_row = self.spec.tile_dim // STORED_DIMS
        items = [first + self.team.thread() for first in range(0, self.spec.rows * per_row, 32)]
        return [(item // per_row, item % per_row * STORED_DIMS) for item in items]

    @cute.jit
    def store_rows(self, rows: PackedRows) -> None:
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
        """Write outputs, or this warp's partial, by its lanes. `sync` after `publish` must come before."""
        if split.whole:
            self.store_rows(rows)
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


# --- segments of clusters ---------------------------------------------------------------------------------------------

# The CTAs of a cluster send each other their partial results, so that each merges a slice of the rows:
#
#     warps -> state of the CTA | slice of every CTA to the CTA that has the slice | wait for its bytes | merge, store
#
# What is sent counts its bytes at a barrier of the CTA that receives it. A barrier of the whole cluster would need a
# fence of the whole GPU before it: 0.6 to 1.1 us on an H100.
#
# Where several clusters share a segment, the CTAs that have the same slice leave it in global memory, and the one that
# arrives last merges those: `count` reads of a few vectors each, in all CTAs of the last clusters at once.


SENT_BYTES = 16 + 8  # of a vector and its statistics


@cute.jit
def open_inbox(barrier: Int32) -> None:
    """Prepare the barrier of this CTA's inbox and tell the other CTAs of the cluster."""
    if cute.arch.thread_idx()[0] == 0:
        tma.barrier_init(barrier, 1)
        tma.fence_barrier_init()
    cluster.arrive_relaxed()


@dataclass(frozen=True)
class ClusterMerge(WarpMerge):
    """Merge of a segment that clusters of CTAs share (`partition.ClusterSegments`)."""

    @staticmethod
    def open(memory: XqaMemory) -> None:
        open_inbox(shared_memory() + memory.inbox_barrier)

    def enter(self) -> None:
        """Wait for the other CTAs: nothing may be sent to one that has not opened its inbox."""
        cluster.wait()

    @cute.jit
    def write(self, rows: PackedRows, segment: Segment, share: Share, split: KvSplit) -> None:
        """Write this CTA's slice of the outputs, by all threads. A barrier after `publish` must come before."""
        tiles = share.size * self.spec.cluster_size
        count = ptx.maximum(ptx.divide(segment.request.tiles + tiles - 1, tiles), Int32(1))
        count = ptx.opaque(count)  # computed here, not after the barriers
        if cute.arch.thread_idx()[0] == 0:
            tma.barrier_expect(self.inbox_barrier, self.slice_vectors(rows) * (self.spec.cluster_size * SENT_BYTES))
        for item in cutlass.range(cute.arch.thread_idx()[0], self.num_vectors(rows), self.threads, unroll=1):
            row, dim = self.row_and_dim(item)
            if self.has_columns(dim):
                self.send(item, self.merge_warps(row, dim))
        cluster.barrier_wait(self.inbox_barrier, Int32(0))
        for index in cutlass.range(cute.arch.thread_idx()[0], self.memory.inbox_vectors, self.threads, unroll=1):
            row, dim, wanted = self.slice(rows, index)
            if wanted:
                result = merge_states([self.received(index, cta) for cta in range(self.spec.cluster_size)])
                if count == 1:
                    self.store(rows, row, dim, result)
                else:
                    self.store_slice(index, row, dim, result)
        if count > 1:
            self.merge_clusters(rows, count)

    @property
    def inbox_barrier(self) -> Int32:
        return self.base + self.memory.inbox_barrier

    @property
    def threads(self) -> int:
        return 32 * self.spec.warps

    def slice(self, rows: PackedRows, index: Int32) -> tuple[Int32, Int32, Boolean]:
        """Row and dimension of a vector of this CTA's slice, and whether it exists."""
        item = cluster.rank() * self.memory.inbox_vectors + index
        row, dim = self.row_and_dim(item)
        return row, dim, self.with_columns(item < self.num_vectors(rows), dim)

    def slice_vectors(self, rows: PackedRows) -> Int32:
        """Number of vectors of this CTA's slice that exist."""
        start, total = cluster.rank() * self.memory.inbox_vectors, self.num_vectors(rows)
        return self.vectors_below(ptx.minimum(start + self.memory.inbox_vectors, total)) - self.vectors_below(
            ptx.minimum(start, total)
        )

    def vectors_below(self, item: Int32) -> Int32:
        """Number of vectors before this one that are no padding."""
        in_row, held = item % self.vectors_per_row, self.spec.warp_dim // VECTOR_WIDTH
        return item // self.vectors_per_row * held + ptx.minimum(in_row, Int32(held))

    # --- CTAs of a cluster ------------------------------------------------------------------------------------------

    def send(self, item: Int32, state: SoftmaxState) -> None:
        """Send a vector to the CTA that has it in its slice."""
        vectors = self.memory.inbox_vectors
        to = item // vectors
        place = cluster.rank() * vectors + (item - to * vectors)
        inbox = cluster.in_cta(self.base, to)
        barrier = inbox + self.memory.inbox_barrier
        values = [ptx.bits(x) for x in state.values]
        cluster.store_async(inbox + self.memory.inbox + place * 16, values, barrier)
        stats = [ptx.bits(state.maximum), ptx.bits(state.total)]
        cluster.store_async(inbox + self.memory.inbox_stats + place * 8, stats, barrier)

    def received(self, index: Int32, cta: int) -> SoftmaxState:
        """Vector `index` of this CTA's slice, from a CTA of the cluster."""
        place = cta * self.memory.inbox_vectors
        maximum, total = ptx.ld_shared_v2_f32(self.base + index * 8, self.memory.inbox_stats + place * 8)
        values = ptx.ld_shared_v4_f32(self.base + index * 16, self.memory.inbox + place * 16)
        return SoftmaxState(maximum, total, values)

    # --- clusters of a segment --------------------------------------------------------------------------------------

    @cute.jit
    def store_slice(self, index: Int32, row: Int32, dim: Int32, result: SoftmaxState) -> None:
        """Leave a vector in this CTA's partial, and once per row its statistics."""
        stats, outputs = self.partial_address(self.cta_index(cute.arch.block_idx()[1]), row)
        if cutlass.or_(dim == 0, index == 0):
            ptx.st_global_v2_f32(stats, 0, [result.maximum, result.total])
        ptx.st_global_v4_f32(outputs + Int64(dim * 4), 0, result.values)

    @cute.jit
    def merge_clusters(self, rows: PackedRows, count: Int32) -> None:
        """Count this CTA as done with its slice, one of `count`. The last merges all and resets the counter."""
        counter = self.counter_address(cluster.rank())
        if self.arrive(counter) == count - 1:
            self.reset(counter)
            for index in cutlass.range(cute.arch.thread_idx()[0], self.memory.inbox_vectors, self.threads, unroll=1):
                row, dim, wanted = self.slice(rows, index)
                if wanted:
                    state = SoftmaxState.empty(VECTOR_WIDTH)
                    for number in cutlass.range(0, count, unroll=4):
                        cta = self.cta_index(number * self.spec.cluster_size + cluster.rank())
                        state = merge_states([state, self.load_partial(cta, rows, row, dim)])
                    self.store(rows, row, dim, state)
