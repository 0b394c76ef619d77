"""Pairs of CTAs that share work items: products of both (cta_group::2), started by the leader, which has rank 0.

Each CTA loads its own query tiles, half of the keys of K and half of the columns of V. All bytes count at the leader's
full barriers. Commits arrive at the same barrier in both CTAs: slots become free, S and O are ready, in both at once.
What both CTAs have to release before the leader's next product, they release at the leader.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import cluster, ptx, tma
from cute_attn.kernels.blocks.kv_sources import TmaOperand
from cute_attn.kernels.blocks.persistent_params import Maps
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings
from cute_attn.kernels.blocks.producer import OneCta
from cute_attn.kernels.blocks.smem_map import TileMemory
from cute_attn.kernels.blocks.tile_scheduler import NEXT_TILE_WORD, DynamicTileScheduler
from cute_attn.kernels.fa4.parts.umma import BlackwellRings, TmemRing
from cute_attn.kernels.fa4.spec import QUERY_TILE_ROWS

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


class TmemLeaderRing(LeaderRing, TmemRing):
    """Such a ring of tensor memory."""

    relaxed = True


@dataclass(frozen=True)
class PairRings(BlackwellRings):
    """Rings of a CTA of a pair."""

    tmem_ring = TmemLeaderRing
    shared: ClassVar[Mapping[str, type[Ring]]] = {"next": LeaderRing}


@dataclass(frozen=True)
class PairTileScheduler(DynamicTileScheduler):
    """Dynamic scheduler of pairs: the leader draws the index of the next work item and stores it to the records of both
    CTAs.
    """

    ring: Ring  # "next", of as many slots as Q's ring, at the same state

    def first(self) -> Int32:
        return cute.arch.block_idx()[0] // CTAS

    @cute.jit
    def broadcast_next(self, fetched: Int32, record: Int32, q: PipelineState) -> Int32:
        ring, word = self.ring, record + Int32(4 * NEXT_TILE_WORD)
        if self.thread == 0:
            tma.barrier_expect(ring.full(q), INDEX_BYTES)
        if self.draws():
            ring.wait_empty(q)
            for cta in (0, 1):
                slot, full = (cluster.in_cta(address, cta) for address in (word, ring.full(q)))
                cluster.store_async(slot, [fetched], full)
        ring.wait_full(q)
        index = cute.arch.make_warp_uniform(ptx.ld_shared_b32(word))
        ptx.sync_warp()
        ring.release(q, self.thread)
        return index + self.teams()

    def draws(self) -> Boolean:
        return (self.thread | cluster.rank()) == 0

    def teams(self) -> Int32:
        return cute.arch.grid_dim()[0] // CTAS


class CtaPair(OneCta):
    """CTA of a pair. Query tile i of the CTA of rank r is number 2 i + r of the work item."""

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (CTAS, 1, 1)

    @property
    def producer_rings(self) -> tuple[str, ...]:
        return ("next",)

    def leads(self) -> Boolean:
        return cute.arch.make_warp_uniform(cluster.rank()) == LEADER

    def sync(self) -> None:
        cluster.sync()

    def expect(self, barrier: Int32, num_bytes: int) -> None:
        """Loads of both CTAs count at the leader's barriers. The other CTA's own only count its arrivals: its warps
        wait for records, not for data.
        """
        expected = ptx.select(cluster.rank() == LEADER, Int32(CTAS * num_bytes), Int32(0))
        tma.barrier_expect(barrier, expected)

    def load_4d(self, shared: Int32, tensor_map: Int64, place: list[Int32], barrier: Int32, policy: int) -> None:
        tma.load_4d(shared, tensor_map, place, cluster.in_cta(barrier, LEADER), policy, ".cta_group::2")

    def operands(self, maps: Maps, memory: TileMemory, cols: int) -> tuple[TmaOperand, TmaOperand]:
        rank, keys, columns = cluster.rank(), cols // CTAS, memory.loaded("v").columns
        k = TmaOperand(maps.k, memory.loaded("k"), keys, first_key=rank * keys)
        return k, TmaOperand(maps.v, memory.loaded("v"), cols, first_column=rank * columns)

    def q_boxes(self, rows: int) -> list[tuple[Int32, int]]:
        first, query_tiles = cluster.rank() * QUERY_TILE_ROWS, rows // (CTAS * QUERY_TILE_ROWS)
        return [(first + i * CTAS * QUERY_TILE_ROWS, i * QUERY_TILE_ROWS) for i in range(query_tiles)]

    def q_rows(self, rows: int) -> int:
        return rows // CTAS

    def drain(self, ring: Ring, state: PipelineState) -> None:
        """Waits until all slots are empty: the leader's commits still arrive here after its last product has started,
        and must not find that this CTA has left.
        """
        for _ in range(ring.stages):
            ring.wait_empty(state)
            state = ring.next(state)

    def scheduler(self, counters: Int64, thread: Int32, rings: SmemRings) -> DynamicTileScheduler:
        return PairTileScheduler(counters, thread, rings.by_name["next"])

    def clear(self, shared: Int32, offset: int) -> None:
        for cta in range(CTAS):
            cluster.st_shared_v4(cluster.in_cta(shared, cta), offset, [Int32(0) for _ in range(4)])

    def fence_async(self) -> None:
        cluster.fence_async()
