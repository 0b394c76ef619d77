"""Softmax warpgroups: one per query tile, a row per thread, P in place of S in tensor memory. All run the same code.

Anchors trail the row's maximum, as in fa3: only the first kv tile is searched for its maximum. The sums show afterwards
whether exponentials overflowed the slack; S is intact until then, and P is computed anew from it. So no row maximum, no
hand-over of scale factors and no correction between S and P.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.masks import TileOrder, hide
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings, WarpRole, start
from cute_attn.kernels.blocks.scores import Scores, score_scale
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.parts.exp2 import PairSums
from cute_attn.kernels.fa4.parts.row_masks import StopWords, Word
from cute_attn.kernels.fa4.parts.umma import CHUNK_COLUMNS, RowLanes, TmemMap, UmmaTile
from cute_attn.kernels.fa4.smem import SCORE_COLUMNS
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.fa4.work import CoveredProducts, KvSteps, OutstandingProducts

WARPS = 4
RESCALED_COLUMNS = 16  # at a time


class RowState(NamedTuple):
    """Shift (see `OnlineSoftmax`) and sum of a thread's row."""

    shift: Float32
    total: Float32


@dataclass(frozen=True)
class SoftmaxContext:
    """What the softmax of a work item's query tile needs besides its state."""

    softmax: OnlineSoftmax
    scores: Scores
    mask: StopWords
    order: TileOrder
    first: Int32  # step
    s: Int32  # address in tensor memory, of the warp's lanes of stage 0
    o: Int32
    products: CoveredProducts

    def at(self, ring: Ring, s: PipelineState) -> "SoftmaxContext":
        """Returns the context of the kv tile whose scores are at this state of their ring."""
        return replace(self, s=self.s + ring.slot(s) * SCORE_COLUMNS, products=self.products.at(ring, s))


class SoftmaxWarps:
    """Roles of the softmax warpgroups, one per query tile."""

    def __init__(self, program: PersistentProgram, spec: Fa4Spec, tile: UmmaTile) -> None:
        self.program, self.spec, self.tile = program, spec, tile
        self.roles = [self.role(i) for i in range(spec.tile.query_tiles)]

    def role(self, i: int) -> WarpRole:
        return WarpRole(f"softmax {i}", WARPS, fills={f"stats{i}": WARPS}, reads=(f"s{i}",), reads_records=True)

    @cute.jit
    def run(self, p: PersistentParams, rings: SmemRings, tmem: TmemMap, query_tile: Int32) -> None:
        """Processes one query tile of all work items of the CTA."""
        scale = score_scale(p)
        ring, stats_ring = self.ring(rings, "s", query_tile), self.ring(rings, "stats", query_tile)
        q, s, stats = start(), start(), start()
        head_block = rings.next_head_block(q)
        while head_block >= 0:
            work, lanes = QueryTile.load(rings.record(q)), RowLanes.of(query_tile, self.spec.tile.ctas)
            scales = [self.prepare_q(rings, q, lanes, scale)]
            rings.q.release(q, lanes.lane)
            context = self.context(p, rings, work, lanes, scales, tmem)
            s, state = self.mainloop(ring, context, s)
            self.publish(stats_ring, stats, state, RowLanes.of(query_tile, self.spec.tile.ctas))
            q, stats = rings.q.next(q), stats_ring.next(stats)
            head_block = rings.next_head_block(q)

    def prepare_q(self, rings: SmemRings, q: PipelineState, lanes: RowLanes, scale: Float32) -> Float32:
        """Prepares the thread's row of q, for which 16-bit rows need nothing; returns the scale of its scores."""
        return scale

    def ring(self, rings: SmemRings, name: str, query_tile: Int32) -> Ring:
        """Returns the ring of a query tile, chosen at run time so that both tiles share one copy of the code."""
        own = [rings.by_name[f"{name}{i}"] for i in range(self.spec.tile.query_tiles)]
        data, barriers = (self.of_tile(query_tile, x) for x in ([r.data for r in own], [r.barriers for r in own]))
        return replace(own[0], data=data, barriers=barriers)

    def of_tile(self, query_tile: Int32, values: Any) -> Any:
        return values[0] if len(values) == 1 else ptx.select(query_tile == Int32(0), values[0], values[1])

    def context(
        self,
        p: PersistentParams,
        rings: SmemRings,
        work: QueryTile,
        lanes: RowLanes,
        scales: list[Float32],
        tmem: TmemMap,
    ) -> SoftmaxContext:
        order = self.program.order(p, work)
        steps = KvSteps.of(p, work, order, self.spec.tile)
        return SoftmaxContext(
            softmax=self.program.softmax(p, work, lanes, scales),
            scores=self.program.scores(p, work, lanes, scales),
            mask=self.program.mask(p, work, lanes),
            order=order,
            first=self.of_tile(lanes.query_tile, steps.first),
            s=tmem.scores(lanes.query_tile) + lanes.tmem,
            o=tmem.output(lanes.query_tile) + lanes.tmem,
            products=CoveredProducts() if self.spec.tile.query_tiles == 2 else OutstandingProducts(rings.v, start()),
        )

    @cute.jit
    def mainloop(self, ring: cutlass.Constexpr, context: cutlass.Constexpr, s: PipelineState) -> Any:
        """Turns S into P for all kv tiles of the query tile; the first one counts as masked."""
        order, first = context.order, context.first
        masked = ptx.minimum(ptx.maximum(order.masked, first + 1), order.total)
        state = RowState(context.softmax.no_anchors()[0], Float32(0.0))
        for step in cutlass.range(first, masked, unroll=1):
            s, state = self.step(ring, context, s, state, order.at(step), step == first, True)
        for step in cutlass.range(masked, order.total, unroll=1):
            s, state = self.step(ring, context, s, state, order.full_at(step), Boolean(False), False)
        return s, state

    @cute.jit
    def step(
        self,
        ring: cutlass.Constexpr,
        context: cutlass.Constexpr,
        s: PipelineState,
        state: RowState,
        kv_tile: Int32,
        first: Boolean,
        masked: cutlass.Constexpr,
    ) -> Any:
        """Computes P with the anchors of earlier tiles, and again where that exceeds the slack. The first tile has
        none, so it begins with raising them.
        """
        shift, total, context = state.shift, state.total, context.at(ring, s)
        words = self.words(context, kv_tile) if masked else [None for _ in self.tile.chunks]
        ring.wait_full(s)
        sm100.fence_after_sync()
        limit = Float32(self.limit(context))
        raises, pending = self.raises_first(state, kv_tile, first), Boolean(True)
        while pending:
            if raises:
                # At most once: even NaN and infinite scores do not exceed the limit then.
                limit = Float32(float("inf"))
                shift, total = self.raise_anchors(context, shift, total, kv_tile, first, masked)
            p, tile_total, level = self.probabilities(context, shift, kv_tile, words, masked)
            raises = cute.arch.vote_any_sync(level > limit)
            if not raises:
                self.store(ring, context, s, p)
                total = total + tile_total
            pending = raises
        return ring.next(s), RowState(shift, total)

    def words(self, context: SoftmaxContext, kv_tile: Int32) -> list[Word]:
        """Returns the mask of a kv tile, of which what has to be loaded is loaded while S is computed."""
        start = kv_tile * self.spec.tile.cols
        return context.mask.words([start + Int32(chunk * CHUNK_COLUMNS) for chunk in self.tile.chunks])

    def load(self, context: SoftmaxContext, columns: Int32) -> list[Float32]:
        """Starts loading a chunk of S from `columns`."""
        return sm100.load_columns(context.s + columns, 0, CHUNK_COLUMNS)

    def modified(self, context: SoftmaxContext, s: list[Float32], kv_start: Int32, word: Int32 | None) -> list[Float32]:
        """Returns modified scores of a chunk, those of columns that `word` hides such that exp2 makes 0 of them."""
        s = context.scores.apply(s, kv_start)
        return s if word is None else hide(s, word, context.softmax.hidden)

    def probabilities(
        self, context: SoftmaxContext, shift: Float32, kv_tile: Int32, words: Sequence[Word | None], masked: bool
    ) -> tuple[list[Int32], Float32, Float32]:
        """Computes P of the thread's row, packed, its sum, and what must not exceed `limit`. A chunk is loaded while
        the one before is processed.
        """
        softmax, p = context.softmax, []
        exp2: Any = softmax.exp2  # of pairs
        if masked:  # masks take issue slots, and so do polynomials
            exp2 = exp2.beside_masks()
            softmax = replace(softmax, exp2=exp2)
        sums = exp2.zero_sums()
        shifts = softmax.finite([shift]) if masked else [shift]
        loaded = self.load(context, Int32(0))
        for chunk, word in zip(self.tile.chunks, words, strict=True):
            start = ptx.opaque(kv_tile * self.spec.tile.cols) + Int32(chunk * CHUNK_COLUMNS)
            s = sm100.wait_loads(loaded)
            if chunk + 1 in self.tile.chunks:
                loaded = self.load(context, Int32((chunk + 1) * CHUNK_COLUMNS))
            s = self.modified(context, s, start, None)
            s = self.visible(context, s, word()) if word else s
            exponentials = softmax.exponentials(s, shifts, may_be_empty=False)
            sums = exp2.add(sums, s, exponentials)
            p += self.tile.probabilities(exponentials)
        total = exp2.sum(sums)
        return p, total, self.level(sums, total)

    @cute.jit
    def visible(self, context: cutlass.Constexpr, s: list[Float32], word: Int32) -> Any:
        """Hides columns of a chunk, unless all rows of the warp see all of it: at the diagonal, 1.5 of 4 on average."""
        if cute.arch.vote_any_sync(word != Int32(0)):
            s = hide(s, word, context.softmax.hidden)
        return s

    def limit(self, context: SoftmaxContext) -> float:
        """Returns the largest `level` with which P is kept."""
        return 2.0**context.softmax.slack * self.spec.tile.cols

    def level(self, sums: PairSums, total: Float32) -> Float32:
        """Returns what bounds the exponentials of a tile from above: their sum."""
        return total

    def raises_first(self, state: RowState, kv_tile: Int32, first: Boolean) -> Boolean:
        """Returns whether a kv tile begins with raising the anchors, the same for all threads of the warp."""
        return first

    @cute.jit
    def raise_anchors(
        self,
        context: cutlass.Constexpr,
        shift: Float32,
        total: Float32,
        kv_tile: Int32,
        first: Boolean,
        masked: cutlass.Constexpr,
    ) -> Any:
        """Moves the anchors of rows whose maximum exceeds the slack to it; rescales sums, and outputs unless there is
        none yet. A loop over small chunks, since it is rare.
        """
        high = Float32(ptx.NEG_INF)
        for column in cutlass.range(0, self.spec.tile.cols, CHUNK_COLUMNS, unroll=1):
            start = kv_tile * self.spec.tile.cols + column
            word = context.mask.word(start) if masked else None
            s = self.modified(context, sm100.wait_loads(self.load(context, column)), start, word)
            s = context.softmax.ascending(s)
            for i in cutlass.range_constexpr(0, CHUNK_COLUMNS, 2):
                high = ptx.fmax_nan(high, s[i], s[i + 1])
        new, factor = self.raised(context, high, shift, total, kv_tile)
        columns = ptx.select(first, Int32(0), Int32(self.tile.output_columns))
        context.products.wait()
        rescale(context.o, columns, factor)
        return new, total * factor

    def raised(
        self, context: SoftmaxContext, high: Float32, shift: Float32, total: Float32, kv_tile: Int32
    ) -> tuple[Float32, Float32]:
        """Returns the shift of a row whose largest score of the tile is `high`, and the factor for what was summed."""
        softmax = context.softmax
        (old,) = softmax.finite([shift])
        new = softmax.anchor(high, 0)
        new = ptx.select(high == Float32(float("inf")), Float32(float("nan")), new)
        # The negation holds for NaN too, which spreads over the row.
        exceeds = Boolean(softmax.exponent(high, old) <= Float32(softmax.slack)) == Boolean(False)
        return ptx.select(exceeds, new, shift), ptx.select(exceeds, ptx.exp2(new - old), Float32(1.0))

    def store(self, ring: Ring, context: SoftmaxContext, s: PipelineState, p: list[Int32]) -> None:
        """Stores P over S and releases it to the products."""
        for i in range(0, len(p), 32):
            sm100.store_columns(context.s, i, p[i : i + 32])
        sm100.wait_stores()
        sm100.fence_before_sync()
        ptx.sync_warp()
        ring.release(s, cute.arch.thread_idx()[0] & 31)

    def publish(self, ring: Ring, stats: PipelineState, state: RowState, lanes: RowLanes) -> None:
        """Hands shift and sum of every row to the epilogue."""
        ring.wait_empty(stats)
        ptx.st_shared_v2_f32(ring.address(stats) + lanes.lane_row * 8, 0, [state.shift, state.total])
        ptx.sync_warp()
        ring.fill(stats, lanes.lane)


@cute.jit
def rescale(o: Int32, columns: Int32, factor: Float32) -> None:
    """Multiplies the first columns of the thread's row of O in tensor memory, a multiple of `RESCALED_COLUMNS`."""
    factors = sm100.pair(factor, factor)
    for at in cutlass.range(0, columns, RESCALED_COLUMNS, unroll=1):
        values, scaled = sm100.wait_loads(sm100.load_columns(o + at, 0, RESCALED_COLUMNS)), []
        for i in cutlass.range_constexpr(0, RESCALED_COLUMNS, 2):
            scaled += sm100.halves(sm100.mul_pair(sm100.pair(values[i], values[i + 1]), factors))
        sm100.store_columns(o + at, 0, scaled)
    sm100.wait_stores()
