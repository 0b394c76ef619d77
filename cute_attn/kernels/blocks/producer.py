"""Producer of persistent kernels: fetches query tiles and copies Q, K and V into rings of shared memory, in the order
K0 Q V0 K1 V1 K2 V2 ... per query tile. K and V go to staging rings where transform warps make operands of them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.attention_spec import PersistentSpec
from cute_attn.kernels.blocks.kv_sources import (
    DenseTmaKV,
    GatheredFp8KV,
    GatheredKV,
    KvSource,
    PagedTmaKV,
    PageRows,
    PageTable,
    TmaOperand,
)
from cute_attn.kernels.blocks.persistent_params import AnyParams, Maps, PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings, WarpRole, start
from cute_attn.kernels.blocks.smem import CHUNK
from cute_attn.kernels.blocks.smem_map import TileMemory
from cute_attn.kernels.blocks.tile_scheduler import (
    NO_TILE,
    DynamicTileScheduler,
    QueryTile,
    WarpgroupTileScheduler,
    tile_at,
)
from cute_attn.kernels.formats import KV_BITS, LINE

PRODUCER_BARRIER = 8  # named barrier of a warpgroup that gathers; families use other numbers


@dataclass(frozen=True)
class OneCta:
    """CTA that processes work items alone."""

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """Dimensions of a cluster; None: the kernel is launched without."""
        return None

    @property
    def producer_rings(self) -> tuple[str, ...]:
        """Names of rings by which the producers of a cluster agree."""
        return ()

    def leads(self) -> Boolean:
        """Whether this CTA does what is done once per work item."""
        return Boolean(True)

    def sync(self) -> None:
        """Waits for all threads that share work items."""
        ptx.sync_threads()

    def expect(self, barrier: Int32, num_bytes: int) -> None:
        """Arrives at the full barrier of a slot, which `num_bytes` of TMA loads will fill."""
        tma.barrier_expect(barrier, num_bytes)

    def load_4d(self, shared: Int32, tensor_map: Int64, place: list[Int32], barrier: Int32, policy: int) -> None:
        tma.load_4d(shared, tensor_map, place, barrier, policy)

    def operands(self, maps: Maps, memory: TileMemory, cols: int) -> tuple[TmaOperand, TmaOperand]:
        """Returns the parts of K and V that this CTA loads of every kv tile."""
        return TmaOperand(maps.k, memory.loaded("k"), cols), TmaOperand(maps.v, memory.loaded("v"), cols)

    def q_boxes(self, rows: int) -> list[tuple[Int32, int]]:
        """Returns the rows that this CTA loads of a work item of `rows` rows: first row of a box, and where it goes."""
        return [(Int32(0), 0)]

    def q_rows(self, rows: int) -> int:
        """Returns how many rows these are in all."""
        return rows

    def drain(self, ring: Ring, state: PipelineState) -> None:
        """Waits, after the last load, for releases that others may send until they exit."""

    def scheduler(self, counters: Int64, thread: Int32, rings: Any) -> DynamicTileScheduler:
        return DynamicTileScheduler(counters, thread)

    def clear(self, shared: Int32, offset: int) -> None:
        """Zeroes 16 bytes of shared memory in all CTAs that share work items."""
        ptx.st_shared_v4(shared, offset, [Int32(0) for _ in range(4)])

    def fence_async(self) -> None:
        """Orders this thread's accesses of their shared memory before later ones by TMA and products."""
        tma.fence_async()


ONE_CTA = OneCta()


class Producer:
    """Producer warp of a `PersistentProgram`, or the warps that gather 16-bit rows: those of its `gathered_kv`."""

    def __init__(self, program: Any) -> None:
        spec, memory, cta = program.spec, program.memory, program.cta
        self.program, self.spec, self.memory, self.cta = program, spec, memory, cta
        self.source_type = source_type(spec, program.gathered_kv)
        loaded = (memory.loaded_ring("k"), memory.loaded_ring("v"))
        fills = {"q": 1, **dict.fromkeys(loaded, self.source_type.arrivals), **dict.fromkeys(cta.producer_rings, 1)}
        self.role = WarpRole("producer", self.source_type.warps, fills, cta.producer_rings)

    @cute.jit
    def run(self, p: AnyParams, maps: Maps, rings: SmemRings) -> None:
        """Loads all tiles into the rings, then the record `NO_TILE`."""
        thread = cute.arch.thread_idx()[0]
        scheduler = (
            WarpgroupTileScheduler(p.counters, thread, PRODUCER_BARRIER, 32 * self.role.warps)
            if self.role.warps > 1
            else self.cta.scheduler(p.counters, thread, rings)
        )
        q, k, v = start(), start(), start()
        query_tile = self.program.query_tile
        work = tile_at(p, scheduler.first(), query_tile)
        while work.head_block >= 0:
            order, source = self.program.order(p, work), self.source(p, maps, work)
            first = ptx.maximum(order.at(Int32(0)), Int32(0))  # -1 where there is no tile at all
            page_ids = source.prefetch_page_ids(first)
            if order.total > 0:
                self.load(rings.staged_k, k, source, source.k, first, page_ids)
            rings.q.wait_empty(q)
            self.load_q(p, maps, rings, q, work, thread)
            if order.total > 0:
                source.commit([rings.staged_k.full(k)])
            for step in cutlass.range(1, order.total, unroll=1):
                next_page_ids = source.prefetch_page_ids(order.at(step))
                self.load(rings.staged_v, v, source, source.v, order.at(step - 1), page_ids)
                k = rings.staged_k.next(k)
                self.load(rings.staged_k, k, source, source.k, order.at(step), next_page_ids)
                source.commit([rings.staged_v.full(v), rings.staged_k.full(k)])
                v, page_ids = rings.staged_v.next(v), next_page_ids
            fetched = scheduler.fetch_next()
            if order.total > 0:
                self.load(rings.staged_v, v, source, source.v, order.at(order.total - 1), page_ids)
                source.commit([rings.staged_v.full(v)])
                v, k = rings.staged_v.next(v), rings.staged_k.next(k)
            work = tile_at(p, scheduler.broadcast_next(fetched, rings.record(q), q), query_tile)
            q = rings.q.next(q)
        scheduler.finish()
        ptx.grid_dependency_launch()
        rings.q.wait_empty(q)
        if thread == 0:
            QueryTile(*(Int32(x) for x in NO_TILE)).store(rings.record(q))
            tma.barrier_arrive(rings.q.full(q))
        self.cta.drain(rings.staged_k, k)
        self.cta.drain(rings.staged_v, v)

    @cute.jit
    def load_q(
        self,
        p: AnyParams,
        maps: Maps,
        rings: SmemRings,
        q: PipelineState,
        work: cutlass.Constexpr,
        thread: Int32,
    ) -> None:
        """Loads a query tile and stores its record; rows past the end hold the next request's queries, or zeros."""
        if thread == 0:
            work.store(rings.record(q))
            rows, barrier, target = work.rows(p), rings.q.full(q), rings.q.address(q)
            column_rows = self.cta.q_rows(self.spec.tile.rows)
            unused = (self.spec.tile.rows - p.tile_rows) * (self.memory.qk_columns * LINE)
            self.cta.expect(barrier, rings.q.slot_bytes - unused)
            for row, slot_row in self.cta.q_boxes(self.spec.tile.rows):
                token = work.qo_start + rows.token(row)
                for column in cutlass.range_constexpr(self.memory.qk_columns):
                    box = target + Int32((column * column_rows + slot_row) * LINE)
                    coordinates = [Int32(column * self.memory.line_items), Int32(0), token, work.head_block]
                    self.cta.load_4d(box, maps.q, coordinates, barrier, tma.EVICT_FIRST)

    def load(
        self, ring: Ring, state: PipelineState, source: Any, operand: Any, kv_tile: Int32, page_ids: list[Int32]
    ) -> None:
        ring.wait_empty(state)
        source.copy(operand, ring.address(state), ring.full(state), kv_tile, page_ids)

    def source(self, p: PersistentParams, maps: Maps, work: QueryTile) -> Any:
        cols, thread = self.spec.tile.cols, cute.arch.thread_idx()[0]
        kv_head = work.kv_head(p)
        k, v = self.cta.operands(maps, self.memory, cols)
        if self.source_type is DenseTmaKV:
            return DenseTmaKV(cols, kv_head, thread, k, v, self.cta, work.kv_start)
        pages = PageTable(p.kv_indices + Int64(work.kv_start) * Int64(4), p.page_size, work.kv_end)
        if self.source_type is PagedTmaKV:
            return PagedTmaKV(cols, kv_head, thread, k, v, self.cta, pages, p.box_rows)
        assert issubclass(self.source_type, GatheredKV | GatheredFp8KV)
        k_base, v_base = p.k_address + Int64(kv_head) * p.k_stride_h, p.v_address + Int64(kv_head) * p.v_stride_h
        k_rows = PageRows(k_base, p.k_page_stride, p.k_stride_n, self.chunks(self.spec.head_dim_qk))
        v_rows = PageRows(v_base, p.v_page_stride, p.v_stride_n, self.chunks(self.spec.head_dim_vo))
        return self.source_type(cols, thread, pages, k_rows, v_rows)

    def chunks(self, head_dim: int) -> int:
        """Returns the 16-byte chunks of a stored row of K or V."""
        bits = KV_BITS[self.spec.kv_dtype] if self.spec.kv_dtype else 8 * self.memory.item_bytes
        return head_dim * bits // 8 // CHUNK


def source_type(spec: PersistentSpec, gathered: type[GatheredKV]) -> type[KvSource]:
    """Returns how K and V tiles are loaded."""
    sources: dict[str, type[KvSource]] = {
        "dense": DenseTmaKV,
        "paged": PagedTmaKV,
        "gathered": GatheredFp8KV if spec.kv_dtype else gathered,
    }
    return sources[spec.kv]
