"""Pairs of CTAs that take the same work items: the ring whose slots both release at the leader, and the scheduler."""

from dataclasses import dataclass
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import cluster, ptx, tma
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring
from cute_attn.kernels.blocks.tile_scheduler import NEXT_TILE_WORD, DynamicTileScheduler

CTAS = 2
LEADER = 0
INDEX_BYTES = 4


class LeaderRing(Ring):
    """Ring whose slots the leader fills in both CTAs, and whose readers in both release them at the leader. `relaxed`:
    the slots lie in tensor memory, whose fences the arrivals rely on.
    """

    relaxed: ClassVar[bool] = False

    def initialise(self, writers: int, readers: int) -> None:
        super().initialise(writers, CTAS * readers)

    def wait_empty(self, state: PipelineState) -> None:
        cluster.barrier_wait(self.empty(state), self.parity(state) ^ 1, relaxed=self.relaxed)

    def wait_released(self, state: PipelineState) -> None:
        cluster.barrier_wait(self.empty(state), self.parity(state), relaxed=self.relaxed)

    @cute.jit
    def release(self, state: PipelineState, lane: Int32) -> None:
        if lane == 0:
            cluster.barrier_arrive(cluster.in_cta(self.empty(state), LEADER), relaxed=self.relaxed)


@dataclass(frozen=True)
class PairTileScheduler(DynamicTileScheduler):
    """Dynamic scheduler of pairs: the leader draws the index of the next work item and stores it to the records of both
    CTAs.
    """

    ring: Ring  # "next", of as many slots as Q's ring, at the same state

    def first(self) -> Int32:
        return cute.arch.block_idx()[0] // CTAS

    @cute.jit
    def fetch_next(self) -> Int32:
        fetched = Int32(0)
        if self.draws():
            fetched = tma.atomic_increment(self.counters)
        return fetched

    @cute.jit
    def broadcast_next(self, fetched: Int32, record: Int32, q: PipelineState) -> Int32:
        ring, word = self.ring, record + Int32(4 * NEXT_TILE_WORD)
        if self.thread == 0:
            tma.barrier_expect(ring.full(q), INDEX_BYTES)
        if self.draws():
            ring.wait_empty(q)
            for cta in (0, 1):
                slot, full = (cluster.in_cta(address, cta) for address in (word, ring.full(q)))
                cluster.store_async(slot, fetched, full)
        ring.wait_full(q)
        index = cute.arch.make_warp_uniform(ptx.ld_shared_b32(word))
        ptx.sync_warp()
        ring.release(q, self.thread)
        return index + cute.arch.grid_dim()[0] // CTAS

    @cute.jit
    def finish(self) -> None:
        if self.draws():
            stopped = tma.atomic_increment(self.counters + Int64(4))
            if stopped == cute.arch.grid_dim()[0] // CTAS - 1:
                tma.st_global_u32(self.counters, Int32(0))
                tma.st_global_u32(self.counters + Int64(4), Int32(0))

    def draws(self) -> Boolean:
        """Whether this thread draws for the pair."""
        return (self.thread | cluster.rank()) == 0
