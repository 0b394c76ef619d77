"""Softmax warpgroups: one per query tile, a row per thread, P in place of S in tensor memory.

Exponents are relative to anchors that trail the row's maximum, as in fa3: only the first kv tile is searched for its
maximum. The sums show afterwards whether exponentials overflowed the slack; S is intact until then, and the tile is
recomputed from it. So no row maximum, no hand-over of scale factors and no correction between S and P.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100, tma
from cute_attn.kernels.blocks.masks import BandMask, TileOrder
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings, start
from cute_attn.kernels.blocks.roles import WarpRole
from cute_attn.kernels.blocks.scalars import device_scale
from cute_attn.kernels.blocks.scores import Scores
from cute_attn.kernels.blocks.softmax import OnlineSoftmax, any_of
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.parts.lanes import RowLanes
from cute_attn.kernels.fa4.parts.umma import CHUNK_COLUMNS, TmemMap, UmmaTile
from cute_attn.kernels.fa4.smem import SCORE_COLUMNS
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.fa4.work import CoveredProducts, KvSteps, OutstandingProducts

WARPS = 4


class RowState(NamedTuple):
    """Anchor and sum of a thread's row, as `OnlineSoftmax` keeps them."""

    shift: list[Float32]
    total: list[Float32]


@dataclass(frozen=True)
class SoftmaxContext:
    """What the softmax of a work item's query tile needs besides its state."""

    softmax: OnlineSoftmax
    scores: Scores
    mask: BandMask
    order: TileOrder
    first: Int32  # step
    s: Int32  # address in tensor memory, of the warp's lanes of stage 0
    o: Int32
    products: CoveredProducts

    def at(self, ring: Ring, s: PipelineState) -> "SoftmaxContext":
        """Returns the context of the kv tile whose scores are at this state of their ring."""
        return replace(self, s=self.s + ring.slot(s) * SCORE_COLUMNS, products=self.products.at(ring, s))


class SoftmaxWarps:
    """Role of the softmax warpgroup of one query tile."""

    def __init__(self, program: PersistentProgram, spec: Fa4Spec, tile: UmmaTile, query_tile: int) -> None:
        self.program, self.spec, self.tile, self.query_tile = program, spec, tile, query_tile
        self.role = WarpRole(
            f"softmax {query_tile}",
            WARPS,
            fills={f"stats{query_tile}": WARPS},
            reads=(f"s{query_tile}",),
            reads_records=True,
        )

    @cute.jit
    def run(self, p: PersistentParams, rings: SmemRings, tmem: TmemMap) -> None:
        """Processes the query tile of all work items of the CTA."""
        scale = p.scale * device_scale(p.scale0) * device_scale(p.scale1)
        ring, stats_ring = rings.by_name[f"s{self.query_tile}"], rings.by_name[f"stats{self.query_tile}"]
        q, s, stats = start(), start(), start()
        head_block = rings.next_head_block(q)
        while head_block >= 0:
            work, lanes = QueryTile.load(rings.record(q)), RowLanes.of(self.query_tile, self.spec.tile.ctas)
            rings.q.release(q, lanes.lane)
            context = self.context(p, rings, work, lanes, scale, tmem)
            state = RowState(context.softmax.no_anchors(), context.softmax.zero_sums())
            s, state = self.mainloop(ring, context, s, state)
            self.publish(stats_ring, stats, state, lanes)
            q, stats = rings.q.next(q), stats_ring.next(stats)
            head_block = rings.next_head_block(q)

    def context(
        self, p: PersistentParams, rings: SmemRings, work: QueryTile, lanes: RowLanes, scale: Any, tmem: TmemMap
    ) -> SoftmaxContext:
        order = self.program.order(p, work)
        steps = KvSteps.of(p, work, order, self.spec.tile)
        return SoftmaxContext(
            softmax=self.program.softmax(p, work, lanes, scale),
            scores=self.program.scores(p, work, lanes, scale),
            mask=self.program.mask(p, work, lanes),
            order=order,
            first=steps.first[self.query_tile],
            s=tmem.scores(Int32(self.query_tile)) + lanes.tmem,
            o=tmem.output(self.query_tile) + lanes.tmem,
            products=CoveredProducts() if self.spec.tile.query_tiles == 2 else OutstandingProducts(rings.v, start()),
        )

    @cute.jit
    def mainloop(
        self, ring: cutlass.Constexpr, context: cutlass.Constexpr, s: PipelineState, state: RowState
    ) -> Any:
        """Turns S into P for all kv tiles of the query tile."""
        order, first = context.order, context.first
        if first < order.total:
            s, state = self.first_step(ring, context, s, order.at(first))
            masked = ptx.maximum(order.masked, first + 1)
            for step in cutlass.range(first + 1, masked, unroll=1):
                s, state = self.step(ring, context, s, state, order.at(step), True)
            for step in cutlass.range(masked, order.total, unroll=1):
                s, state = self.step(ring, context, s, state, order.full_at(step), False)
        return s, state

    def first_step(self, ring: Ring, context: SoftmaxContext, s: PipelineState, kv_tile: Int32) -> Any:
        """Processes the first kv tile, which may be masked, from its row maximum."""
        softmax, context = context.softmax, context.at(ring, s)
        ring.wait_full(s)
        sm100.fence_after_sync()
        high = [Float32(ptx.NEG_INF)]
        for chunk in self.tile.chunks:
            scores = self.load_scores(context, kv_tile, chunk, True)
            high = [ptx.fmax(a, b) for a, b in zip(high, softmax.row_max(scores), strict=True)]
        shift = [softmax.anchor(high[0], 0)]
        p, sums = self.probabilities(context, shift, kv_tile, True, may_be_empty=True)
        self.store(ring, context, s, p)
        return ring.next(s), RowState(shift, sums)

    def step(
        self, ring: Ring, context: SoftmaxContext, s: PipelineState, state: RowState, kv_tile: Int32, masked: bool
    ) -> Any:
        """Processes a kv tile with the anchors of earlier ones."""
        softmax, context = context.softmax, context.at(ring, s)
        ring.wait_full(s)
        sm100.fence_after_sync()
        shift = softmax.finite(state.shift) if masked else state.shift
        p, sums = self.probabilities(context, shift, kv_tile, masked, may_be_empty=False)
        exceeds = self.exceeds_slack(softmax, sums)
        p, sums, state = self.recompute(context, p, sums, state, exceeds, kv_tile, masked)
        self.store(ring, context, s, p)
        total = [a + b for a, b in zip(state.total, sums, strict=True)]
        return ring.next(s), RowState(state.shift, total)

    def exceeds_slack(self, softmax: OnlineSoftmax, sums: list[Float32]) -> Any:
        limit = Float32(2.0**softmax.slack * self.spec.tile.cols)
        return any_of([cutlass.Boolean(total <= limit) == cutlass.Boolean(False) for total in sums])

    def probabilities(
        self, context: SoftmaxContext, shift: list[Float32], kv_tile: Int32, masked: bool, *, may_be_empty: bool
    ) -> tuple[list[Int32], list[Float32]]:
        """Computes P of the thread's row, packed, and its sum."""
        p, sums = [], context.softmax.zero_sums()
        for chunk in self.tile.chunks:
            scores = self.load_scores(context, kv_tile, chunk, masked)
            scores = context.softmax.exponentials(scores, shift, may_be_empty)
            sums = context.softmax.sums(scores, sums)
            p += self.tile.probabilities(scores)
        return p, sums

    def load_scores(self, context: SoftmaxContext, kv_tile: Int32, chunk: int, masked: bool) -> list[Float32]:
        """Loads a chunk of S; returns modified and masked scores."""
        s = sm100.wait_loads(sm100.load_columns(context.s, chunk * CHUNK_COLUMNS, CHUNK_COLUMNS))
        kv_start = kv_tile * self.spec.tile.cols + Int32(chunk * CHUNK_COLUMNS)
        s = context.scores.apply(s, kv_start)
        return context.mask.apply(s, kv_start) if masked else s

    @cute.jit
    def recompute(
        self,
        context: cutlass.Constexpr,
        p: list[Int32],
        sums: list[Float32],
        state: cutlass.Constexpr,
        exceeds: cutlass.Boolean,
        kv_tile: Int32,
        masked: cutlass.Constexpr,
    ) -> Any:
        """Recomputes P and the sums with raised anchors where any thread of the warp needs it, and rescales O."""
        softmax, shift, total = context.softmax, state.shift, state.total
        if cute.arch.vote_any_sync(exceeds):
            high = [Float32(ptx.NEG_INF)]
            for chunk in cutlass.range_constexpr(len(self.tile.chunks)):
                scores = self.load_scores(context, kv_tile, chunk, masked)
                high = [ptx.fmax(a, b) for a, b in zip(high, softmax.row_max(scores), strict=True)]
            rescale = softmax.raised(shift, high, softmax.exceeded(shift, high))
            p, sums = self.probabilities(context, rescale.shift, kv_tile, masked, may_be_empty=masked)
            shift = rescale.shift
            total = [t * factor for t, factor in zip(total, rescale.factors, strict=True)]
            context.products.wait()
            self.rescale_output(context.o, rescale.factors[0])
        return p, sums, RowState(shift, total)

    @cute.jit
    def rescale_output(self, o: Int32, factor: Float32) -> None:
        columns = 16
        for at in cutlass.range(0, self.tile.output_columns, columns, unroll=1):
            values = sm100.wait_loads(sm100.load_columns(o + at, 0, columns))
            sm100.store_columns(o + at, 0, [x * factor for x in values])
        sm100.wait_stores()

    def store(self, ring: Ring, context: SoftmaxContext, s: PipelineState, p: list[Int32]) -> None:
        """Stores P over S and releases it to the products."""
        for i in range(0, len(p), 32):
            sm100.store_columns(context.s, i, p[i : i + 32])
        sm100.wait_stores()
        sm100.fence_before_sync()
        ptx.sync_warp()
        ring.release(s, cute.arch.thread_idx()[0] & 31)

    @cute.jit
    def publish(self, ring: cutlass.Constexpr, stats: PipelineState, state: RowState, lanes: RowLanes) -> None:
        """Hands anchor and sum of every row to the epilogue."""
        ring.wait_empty(stats)
        ptx.st_shared_v2_f32(ring.address(stats) + lanes.lane_row * 8, 0, [state.shift[0], state.total[0]])
        ptx.sync_warp()
        if lanes.lane == 0:
            tma.barrier_arrive(ring.full(stats))
