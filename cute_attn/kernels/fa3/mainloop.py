"""MMA warpgroups of the Hopper kernel: S = Q K^T, softmax and O += P V over the kv tiles of each query tile.

The next S = Q K^T is issued before the last P V, and softmax overlaps the latter. MMA warpgroups of 64 rows take turns
at issuing products, so that the softmax of one overlaps products of another (ping-pong). A warpgroup whose rows see
nothing of the first kv tiles, which lie at the right edge of the mask, skips them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90, tma
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, Target
from cute_attn.kernels.blocks.fragment_store import NarrowStore, WarpgroupStore
from cute_attn.kernels.blocks.masks import BandMask, TileOrder
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import AnyParams, PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, SmemRings, WarpRole, start
from cute_attn.kernels.blocks.scores import Scores, score_scale
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.parts.wgmma import WARPGROUP_ROWS, WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.formats import FP8_DTYPES, LINE

MMA_BARRIER = 4  # named barrier of all MMA threads; 1 to 3 are the warp scheduler barriers of their warpgroups
VOTE_BARRIER = 5  # and the following, one per MMA warpgroup


class State(NamedTuple):
    """Accumulators of an MMA warpgroup between kv tiles, and its state in K's ring; in V's it is one tile behind."""

    out: list[Float32]
    p: list[Int32]
    shift: list[Float32]
    total: list[Float32]
    k: PipelineState


@dataclass(frozen=True)
class MmaWork:
    """Work of an MMA warpgroup on one query tile, composed for the spec."""

    lanes: WarpgroupLanes
    softmax: OnlineSoftmax
    scores: Scores
    mask: BandMask
    order: TileOrder
    skipped: Int32  # kv tiles at the start of the order that this warpgroup's rows do not see
    kv_end: Int32
    q: Int32


class MmaWarpgroups:
    """Role of the MMA warpgroups: products, softmax and output."""

    store_type: type[WarpgroupStore] = WarpgroupStore
    narrow_store_type: type[WarpgroupStore] = NarrowStore  # of fp8 outputs

    def __init__(self, program: PersistentProgram, spec: Fa3Spec, tile: WarpgroupTile) -> None:
        self.program, self.spec, self.tile, self.memory = program, spec, tile, tile.memory
        self.threads = 128 * spec.tile.mma_warpgroups
        self.role = WarpRole("MMA", self.threads // 32, fills={}, reads=("q", "k", "v"), reads_records=True)

    @property
    def clears_tail(self) -> bool:
        """Whether rows of the last V tile may belong to another request, and no transform warp clears them."""
        loads_operand = self.memory.loaded_ring("v") == "v"
        return self.spec.schedule == "items" and self.spec.kv != "gathered" and loads_operand

    @cute.jit
    def run(self, p: AnyParams, rings: SmemRings) -> None:
        """Processes all query tiles of the CTA."""
        lanes = WarpgroupLanes.of()
        scale = score_scale(p)
        if cutlass.const_expr(self.spec.tile.ping_pong):  # noqa: SIM102  (one when tracing, one at run time)
            if lanes.warpgroup == self.spec.tile.mma_warpgroups - 1:
                self.warp_scheduler_arrive(lanes)
        q, k = start(), start()
        head_block = rings.next_head_block(q)
        while head_block >= 0:
            lanes = WarpgroupLanes.of()
            q_rows = rings.q.address(q) + lanes.warpgroup * (WARPGROUP_ROWS * LINE)
            scales = self.program.prepare_q(p, QueryTile.load(rings.record(q)), lanes, q_rows, scale)
            q_operand = self.tile.q_operand(q_rows)
            mma = self.mma_work(p, QueryTile.load(rings.record(q)), lanes, scales, q_operand)
            out, shift, total = self.tile.output_layout.zeros(), mma.softmax.no_anchors(), mma.softmax.zero_sums()
            if mma.order.total > 0:
                self.clear_tail(rings, mma, k)
                k = self.skip_tiles(rings, mma, k)
            if mma.skipped < mma.order.total:
                state = self.mainloop(rings, mma, k)
                rings.q.release(q, lanes.lane)
                out = self.last_output(rings, mma, state)
                shift, total, k = state.shift, state.total, state.k
            else:
                rings.q.release(q, lanes.lane)
            self.store(p, QueryTile.load(rings.record(q)), WarpgroupLanes.of(), out, shift, total)
            ptx.sync_warp()  # lanes have read the record, whose memory lane 0 gives away with the next release of Q
            q = rings.q.next(q)
            head_block = rings.next_head_block(q)

    def mma_work(
        self, p: PersistentParams, work: QueryTile, lanes: WarpgroupLanes, scales: list[Float32], q: Any
    ) -> MmaWork:
        rows, band, order = work.rows(p), work.band(p), self.program.order(p, work)
        return MmaWork(
            lanes=lanes,
            softmax=self.program.softmax(p, work, lanes, scales),
            scores=self.program.scores(p, work, lanes, scales),
            mask=self.program.mask(p, work, lanes),
            order=order,
            skipped=order.skipped(band, rows, lanes.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS, self.spec.tile.cols),
            kv_end=work.kv_end,
            q=q,
        )

    @cute.jit
    def clear_tail(self, rings: SmemRings, mma: cutlass.Constexpr, first: PipelineState) -> None:
        """Zeroes rows of the last V tile that belong to another request or to none: 0 * NaN is not 0. That tile comes
        first.

        Tensor maps of a single request end with its keys, so that TMA fills in zeros; gathered rows are zeros too.
        """
        cols = self.spec.tile.cols
        if cutlass.const_expr(self.clears_tail):  # noqa: SIM102
            if mma.order.end * cols > mma.kv_end:
                rings.v.wait_full(first)
                valid = mma.kv_end - (mma.order.end - 1) * cols
                at = rings.v.address(first) + valid * LINE
                thread = cute.arch.thread_idx()[0] - 128
                for chunk in cutlass.range(thread, (cols - valid) * (LINE // 16), self.threads, unroll=1):
                    for column in cutlass.range_constexpr(self.memory.vo_columns):
                        ptx.st_shared_v4(at + chunk * 16, column * cols * LINE, [Int32(0) for _ in range(4)])
                tma.fence_async()
                tma.named_sync(Int32(MMA_BARRIER), self.threads)

    @cute.jit
    def skip_tiles(self, rings: SmemRings, mma: cutlass.Constexpr, k: PipelineState) -> PipelineState:
        """Skips the kv tiles that only other warpgroups see."""
        for step in cutlass.range(0, mma.skipped, unroll=1):
            for ring in (rings.k, rings.v):
                ring.wait_full(k)
                ring.release(k, mma.lanes.lane)
            if step + 1 < mma.order.total:
                self.warp_scheduler_sync(mma.lanes)
                self.warp_scheduler_arrive(mma.lanes)
            k = rings.k.next(k)
        return k

    @cute.jit
    def mainloop(self, rings: SmemRings, mma: cutlass.Constexpr, k: PipelineState) -> Any:
        """Processes all kv tiles of a query tile, except P V of the last one."""
        step0 = mma.skipped + 1
        state = self.first_kv_tile(rings, mma, k)
        masked, total = ptx.maximum(mma.order.masked, step0), mma.order.total
        for step in cutlass.range(step0, masked, unroll=1):
            state = self.step(rings, mma, state, mma.order.at(step), True)
        for step in cutlass.range(masked, total, unroll=1):
            state = self.step(rings, mma, state, mma.order.full_at(step), False)
        return state

    def last_output(self, rings: SmemRings, mma: MmaWork, state: State) -> list[Float32]:
        """Adds P V of the last kv tile."""
        v = rings.v.previous(state.k)
        rings.v.wait_full(v)
        out = self.tile.accumulate(state.out, state.p, self.tile.v_operand(rings.v.address(v)))
        out = sm90.wgmma_wait(0, out, state.p)
        rings.v.release(v, mma.lanes.lane)
        return out

    def first_kv_tile(self, rings: SmemRings, mma: MmaWork, k: PipelineState) -> State:
        """Computes scores and softmax of the first kv tile, which may be masked."""
        softmax = mma.softmax
        rings.k.wait_full(k)
        s = sm90.wgmma_wait(0, self.tile.scores(mma.q, self.tile.k_operand(rings.k.address(k))))
        rings.k.release(k, mma.lanes.lane)
        s = self.apply_score_mods_and_mask(mma, s, mma.order.at(mma.skipped), True)
        shift = softmax.first_shift(s)
        s = softmax.exponentials(s, shift, may_be_empty=True)
        total = softmax.sums(s, softmax.zero_sums())
        out = self.tile.output_layout.zeros()
        return State(out, self.tile.probabilities(s), shift, total, rings.k.next(k))

    def step(self, rings: SmemRings, mma: MmaWork, state: State, kv_tile: Int32, masked: bool) -> State:
        """Issues S of this kv tile and P V of the previous one; softmax overlaps the latter.

        Exponents are relative to the anchors of earlier tiles, without a row maximum of these scores. The sums show
        afterwards whether they overflowed the slack, and the tile is then recomputed: K stays in its slot until then.
        """
        k, v, lanes, softmax = state.k, rings.v.previous(state.k), mma.lanes, mma.softmax
        k_at, v_at = self.tile.k_operand(rings.k.address(k)), self.tile.v_operand(rings.v.address(v))
        rings.k.wait_full(k)
        self.warp_scheduler_sync(lanes)
        s = self.tile.scores(mma.q, k_at)
        rings.v.wait_full(v)
        out = self.tile.accumulate(state.out, state.p, v_at)
        self.warp_scheduler_arrive(lanes)
        s = self.apply_score_mods_and_mask(mma, sm90.wgmma_wait(1, s), kv_tile, masked)
        s = softmax.exponentials(s, softmax.finite(state.shift) if masked else state.shift, may_be_empty=False)
        sums = softmax.sums(s, softmax.zero_sums())
        exceeds_slack = softmax.exceeds_slack(sums)
        # The vote precedes the wait: otherwise ptxas moves the exponentials, which should overlap P V, behind the wait.
        needs_recompute = tma.any_of_warpgroup(lanes.warpgroup + VOTE_BARRIER, exceeds_slack)
        out = sm90.wgmma_wait(0, out, state.p)
        rings.v.release(v, lanes.lane)
        before = State(out, self.tile.probabilities(s), state.shift, state.total, k)
        after, sums = self.recompute_tile(rings, mma, before, sums, needs_recompute, k_at, kv_tile, masked)
        rings.k.release(k, lanes.lane)
        total = [a + b for a, b in zip(after.total, sums, strict=True)]
        return State(after.out, after.p, after.shift, total, rings.k.next(k))

    def apply_score_mods_and_mask(self, mma: MmaWork, s: list[Float32], kv_tile: Int32, masked: bool) -> list[Float32]:
        kv_start = kv_tile * self.spec.tile.cols
        s = mma.scores.apply(s, kv_start)
        return mma.mask.apply(s, kv_start) if masked else s

    @cute.jit
    def recompute_tile(
        self,
        rings: cutlass.Constexpr,
        mma: cutlass.Constexpr,
        state: cutlass.Constexpr,
        sums: list[Float32],
        needs_recompute: cutlass.Boolean,
        k_at: Int32,
        kv_tile: Int32,
        masked: cutlass.Constexpr,
    ) -> Any:
        """Recomputes the tile's P and sums with raised anchors, if any thread needs it. The branch replaces P, half the
        registers of the scores: otherwise ptxas spills.
        """
        out, p, shift, total = state.out, state.p, state.shift, state.total
        if needs_recompute:
            softmax = mma.softmax
            # Rematerialized, so that values derived from them do not stay in registers through the loop.
            q, k, kv_tile = self.tile.rematerialize(mma.q), *(cute.arch.make_warp_uniform(x) for x in (k_at, kv_tile))
            s = self.apply_score_mods_and_mask(mma, sm90.wgmma_wait(0, self.tile.scores(q, k)), kv_tile, masked)
            rescale = softmax.rescale_factors(shift, s, sums)
            s = softmax.exponentials(s, rescale.shift, may_be_empty=masked)
            p, sums = self.tile.probabilities(s), softmax.sums(s, softmax.zero_sums())
            shift = rescale.shift
            total = [t * factor for t, factor in zip(total, rescale.factors, strict=True)]
            out = self.rescale_output(rings, out, rescale.factors)
        return State(out, p, shift, total, state.k), sums

    def rescale_output(self, rings: SmemRings, out: list[Float32], factors: list[Float32]) -> list[Float32]:
        return self.tile.output_layout.scale_rows(out, factors)

    def warp_scheduler_sync(self, lanes: WarpgroupLanes) -> None:
        """Waits for this warpgroup's turn at issuing products."""
        if self.spec.tile.ping_pong:
            tma.named_sync(lanes.warpgroup + 1, 256)

    def warp_scheduler_arrive(self, lanes: WarpgroupLanes) -> None:
        """Passes the turn to the next warpgroup."""
        if self.spec.tile.ping_pong:
            last = lanes.warpgroup == Int32(self.spec.tile.mma_warpgroups - 1)
            tma.named_arrive(ptx.select(last, Int32(1), lanes.warpgroup + 2), 256)

    def store(
        self,
        p: PersistentParams,
        work: QueryTile,
        lanes: WarpgroupLanes,
        out: list[Float32],
        shift: list[Float32],
        total: list[Float32],
    ) -> None:
        rows = work.rows(p)
        kind = self.narrow_store_type if self.spec.out_dtype in FP8_DTYPES else self.store_type

        def write(target: Target | Partials, epilogue: FinalEpilogue | PartialEpilogue) -> None:
            kind(self.tile.output_layout, lanes, rows, target, epilogue).write(out, shift, total)

        self.program.store(p, work, write)
