"""Merge of the CTAs of a cluster: they send each other their partial results, so that each merges a slice of the rows.

    warps -> state of the CTA | slice of every CTA to the CTA that has the slice | wait for its bytes | merge, store

What is sent counts its bytes at a barrier of the CTA that receives it. A barrier of the whole cluster would need a
fence of the whole GPU before it: 0.6 to 1.1 us on an H100.

Where several clusters share a segment, the CTAs that have the same slice leave it in global memory, and the one that
arrives last merges those: `count` reads of a few vectors each, in all CTAs of the last clusters at once.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import cluster, ptx, tma
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import shared_memory
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.merge import VECTOR_WIDTH, SoftmaxState, merge_states
from cute_attn.kernels.xqa.parts.partition import KvSplit, Segment, Share
from cute_attn.kernels.xqa.parts.warp_merge import WarpMerge
from cute_attn.kernels.xqa.smem import XqaMemory

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
        wanted = item < self.num_vectors(rows)
        if self.has_columns(dim) is not True:
            wanted = isa.all_of([wanted, self.has_columns(dim)])
        return row, dim, wanted

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
        inbox = cluster.in_cta_of(self.base, to)
        barrier = inbox + self.memory.inbox_barrier
        values = [ptx.bits(x) for x in state.values]
        cluster.store_async_vector(inbox + self.memory.inbox + place * 16, values, barrier)
        stats = [ptx.bits(state.maximum), ptx.bits(state.total)]
        cluster.store_async_vector(inbox + self.memory.inbox_stats + place * 8, stats, barrier)

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
                    state = SoftmaxState(
                        Float32(ptx.NEG_INF), Float32(0.0), [Float32(0.0) for _ in range(VECTOR_WIDTH)]
                    )
                    for number in cutlass.range(0, count, unroll=4):
                        cta = self.cta_index(number * self.spec.cluster_size + cluster.rank())
                        state = merge_states([state, self.load_partial(cta, rows, row, dim)])
                    self.store(rows, row, dim, state)
