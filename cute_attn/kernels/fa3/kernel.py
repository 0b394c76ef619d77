"""FlashAttention-3 for Hopper (Shah et al. 2024): TMA, wgmma and specialised warps.

A persistent CTA processes query tiles of `tile.rows` packed rows. A producer warp copies for the MMA warpgroups:

    producer        K0 Q V0 K1 V1 K2 V2 ...                       (rings of slots, across query tiles)
    MMA warpgroup   S0 | S1 + O(P0 V0), softmax 1 | S2 + O(P1 V1), softmax 2 | ... | O(Pn Vn) | store

The next S = Q K^T is issued before the last P V, and softmax overlaps the latter. MMA warpgroups of 64 rows take turns
at issuing products, so that the softmax of one overlaps products of another (ping-pong). A warpgroup whose rows see
nothing of the first kv tiles, which lie at the right edge of the mask, skips them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, GridConstant, Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, Target
from cute_attn.kernels.blocks.masks import BandMask, PackedMask, StopMask, TileOrder
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, start
from cute_attn.kernels.blocks.rows import Divisor, PackedRows
from cute_attn.kernels.blocks.scalars import device_scale, zeros
from cute_attn.kernels.blocks.scores import Alibi, RowScales, Scale, Scores, SoftCap
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import (
    NO_TILE,
    DynamicTileScheduler,
    GridTiles,
    ItemTiles,
    QueryTile,
    WarpgroupTileScheduler,
)
from cute_attn.kernels.fa3.parts import gathered_kv
from cute_attn.kernels.fa3.parts.epilogue import WarpgroupStore
from cute_attn.kernels.fa3.parts.gathered_kv import GatheredFp8KV, GatheredKV, PageRows
from cute_attn.kernels.fa3.parts.rings import SmemRings
from cute_attn.kernels.fa3.parts.tma_kv import DenseTmaKV, PagedTmaKV, TmaOperand
from cute_attn.kernels.fa3.parts.wgmma import WARPGROUP_ROWS, AnyLanes, WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.formats import KV_BITS, LINE
from cute_attn.schedule.records import NO_PARTIAL

MMA_BARRIER = 4  # named barrier of all MMA threads; 1 to 3 are the warp scheduler barriers of their warpgroups
VOTE_BARRIER = 5  # and the following, one per MMA warpgroup
PRODUCER_BARRIER = 8

KVSource = DenseTmaKV | PagedTmaKV | GatheredKV | GatheredFp8KV


class Fa3Params(NamedTuple):
    """Kernel parameters after the tensor maps, in order. Addresses are Int64, 0 where absent; strides are bytes."""

    o: Int64
    lse: Int64
    k_address: Int64
    v_address: Int64
    mask: Int64
    mask_bytes: Int64
    scale0: Int64
    scale1: Int64
    v_scale_ptr: Int64
    sinks: Int64
    o_stride_n: Int64
    o_stride_h: Int64
    counters: Int64
    right: Int32
    left: Int32
    total_tiles: Int32
    num_qo_heads: Int32
    group: Int32  # heads that share a tile's rows
    group_multiplier: Int32
    group_shift: Int32
    kv_group: Int32  # blocks of such heads per kv head
    kv_group_multiplier: Int32
    kv_group_shift: Int32
    scale: Float32
    soft_cap: Float32
    v_scale: Float32
    lse_scale: Float32
    section_tiles: Int32
    section_tiles_multiplier: Int32
    section_tiles_shift: Int32
    section_heads: Int32
    section_heads_multiplier: Int32
    section_heads_shift: Int32
    # schedule "grid"
    qo_len: Int32
    kv_len: Int32
    last_block: Int32
    split_tokens: Int32
    split_tiles: Int32
    split_tiles_multiplier: Int32
    split_tiles_shift: Int32
    # schedule "items"
    items: Int64
    o_partial: Int64
    lse_partial: Int64
    head_blocks: Int32
    # kv "paged" and "gathered"
    page_size: Int32
    page_multiplier: Int32
    page_shift: Int32
    box_rows: Int32
    kv_indices: Int64
    # kv "gathered"
    k_page_stride: Int64
    k_stride_n: Int64
    k_stride_h: Int64
    v_page_stride: Int64
    v_stride_n: Int64
    v_stride_h: Int64
    # fp8: fp32 per head
    scale_q: Int64
    scale_k: Int64
    scale_v: Int64


class Maps(NamedTuple):
    """Generic addresses of the tensor maps: q [line, heads of a tile, tokens, blocks of heads], k and v [line, tokens,
    kv heads, pages].
    """

    q: Int64
    k: Int64
    v: Int64


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


class Fa3Program:
    """Hopper attention kernel for 16-bit q, k and v."""

    params = Fa3Params
    maps = Maps._fields
    store_type = WarpgroupStore
    gathered: type[GatheredKV | GatheredFp8KV] = GatheredKV

    def __init__(self, spec: Fa3Spec, arch: str) -> None:
        self.spec = spec
        self.memory = HopperMemory.of(spec)
        self.tile = self.warpgroup_tile()
        kind = GridTiles if spec.schedule == "grid" else ItemTiles
        self.tiles: GridTiles | ItemTiles = kind(spec.tile.rows, spec.tile.cols)
        self.block = (spec.tile.threads, 1, 1)
        self.smem_bytes = self.memory.bytes
        self.mma_threads = 128 * spec.tile.mma_warpgroups
        self.gathers = spec.kv == "gathered"
        self.producer_warps = gathered_kv.WARPS if self.gathers else 1

    def warpgroup_tile(self) -> WarpgroupTile:
        return WarpgroupTile(self.spec.dtype, self.memory)

    def compile_args(self) -> tuple[Any, ...]:
        return (zeros(Fa3Params), Int32(1), Int32(1), Int32(1))

    @cute.jit
    def __call__(self, params: Fa3Params, grid_x: Int32, grid_y: Int32, grid_z: Int32) -> None:
        # Launches pass their own tensor maps; this one only gives the parameters their type.
        sizes, strides = [Int32(64)] * 4, [Int64(128)] * 3
        blank = create_tensor_map_tiled(
            params.o, BFloat16, sizes, strides, [64, 64, 1, 1], swizzle=TensorMapSwizzle.s128b
        )
        self.kernel(blank, blank, blank, params).launch(
            grid=[grid_x, grid_y, grid_z], block=list(self.block), smem=self.smem_bytes, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        q_map: GridConstant[TensorMap],
        k_map: GridConstant[TensorMap],
        v_map: GridConstant[TensorMap],
        params: Fa3Params,
    ) -> None:
        maps = Maps(*(sm90.address_of(tensor_map) for tensor_map in (q_map, k_map, v_map)))
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint().to(Int32)
        rings = self.rings(base)
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            for tensor_map in maps:
                sm90.prefetch_tensor_map(tensor_map)
            self.initialise(rings)
            sm90.fence_barrier_init()
        ptx.sync_threads()
        ptx.grid_dependency_wait()
        if thread < 128:
            sm90.release_registers(self.spec.registers[0])
            self.producer_warpgroup(params, maps, rings, thread)
        else:
            self.consumer_warpgroups(params, rings, thread)

    def rings(self, base: Int32) -> SmemRings:
        return SmemRings.of(self.memory, base, self.producer_warps)

    def initialise(self, rings: SmemRings) -> None:
        for ring in (rings.q, rings.k, rings.v):
            ring.initialise(self.mma_threads // 32)

    @cute.jit
    def producer_warpgroup(self, params: Fa3Params, maps: Maps, rings: SmemRings, thread: Int32) -> None:
        """Runs the first warpgroup: one warp produces, or all four if they gather rows."""
        if thread < 32 * self.producer_warps:
            self.producer_loop(params, maps, rings)

    def consumer_warpgroups(self, params: Fa3Params, rings: SmemRings, thread: Int32) -> None:
        """Runs the warpgroups after the producer's."""
        self.consumer_warpgroup(params, rings)

    def consumer_warpgroup(self, params: Fa3Params, rings: SmemRings) -> None:
        """Runs one MMA warpgroup."""
        sm90.claim_registers(self.spec.registers[1])
        self.consumer_loop(params, rings)

    # --- composition ------------------------------------------------------------------------------------------------

    def order(self, p: Fa3Params, work: QueryTile) -> TileOrder:
        """Returns the kv tiles of the whole query tile; mask bits are ignored, since they hide no tile."""
        shape = self.spec.tile
        first, last = work.kv_begin // shape.cols, (work.kv_end + Int32(shape.cols - 1)) // shape.cols
        order = work.band(p).tiles(work.rows(p), shape.rows, shape.cols, first, last)
        if self.spec.mask == "stop":  # no left edge: begin is full_begin, which ptxas can use
            return TileOrder(first, first, ptx.maximum(order.full_end, first), ptx.maximum(order.end, first))
        return PackedMask.all_masked(order) if self.spec.mask == "packed" else order

    def source(self, p: Fa3Params, maps: Maps, work: QueryTile) -> KVSource:
        cols, thread = self.spec.tile.cols, cute.arch.thread_idx()[0]
        kv_head = Divisor(p.kv_group, p.kv_group_multiplier, p.kv_group_shift).quotient(work.head_block)
        k, v = self.tma_operands(maps)
        if self.spec.kv == "dense":
            return DenseTmaKV(cols, work.kv_start, kv_head, thread, k, v)
        page_size = Divisor(p.page_size, p.page_multiplier, p.page_shift)
        table = p.kv_indices + Int64(work.kv_start) * Int64(4)
        if self.spec.kv == "paged":
            return PagedTmaKV(cols, kv_head, thread, work.kv_end, table, page_size, p.box_rows, k, v)
        k_base, v_base = p.k_address + Int64(kv_head) * p.k_stride_h, p.v_address + Int64(kv_head) * p.v_stride_h
        k_rows = PageRows(k_base, p.k_page_stride, p.k_stride_n, self.chunks(self.spec.head_dim_qk))
        v_rows = PageRows(v_base, p.v_page_stride, p.v_stride_n, self.chunks(self.spec.head_dim_vo))
        return self.gathered(cols, thread, work.kv_end, table, page_size, k_rows, v_rows)

    def chunks(self, head_dim: int) -> int:
        """Returns the 16-byte chunks of a stored row of K or V."""
        return head_dim * KV_BITS[self.spec.kv_dtype] // 8 // gathered_kv.CHUNK

    def tma_operands(self, maps: Maps) -> tuple[TmaOperand, TmaOperand]:
        memory = self.memory
        k, v = ((maps.k, memory.qk_columns), (maps.v, memory.vo_columns))
        return TmaOperand(*k, memory.line_items, LINE), TmaOperand(*v, memory.line_items, LINE)

    def mma_work(self, p: Fa3Params, work: QueryTile, lanes: WarpgroupLanes, softmax_scale: Any, q: Any) -> MmaWork:
        rows, band, order = work.rows(p), work.band(p), self.order(p, work)
        return MmaWork(
            lanes=lanes,
            softmax=self.softmax(p, work, lanes, softmax_scale),
            scores=self.scores(p, work, lanes, softmax_scale),
            mask=self.mask(p, work, lanes),
            order=order,
            skipped=self.skipped(
                rows, band.stop(rows.last_token_from(lanes.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)), order, lanes
            ),
            kv_end=work.kv_end,
            q=q,
        )

    def softmax(self, p: Fa3Params, work: QueryTile, lanes: WarpgroupLanes, scale: Any) -> OnlineSoftmax:
        layout, log2_scale = self.tile.scores_layout, Float32(ptx.LOG2E) if self.spec.scores else scale
        return OnlineSoftmax(layout, [log2_scale for _ in layout.slots])

    def mask(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes) -> BandMask:
        band, rows, layout = work.band(p), work.rows(p), self.tile.scores_layout
        if self.spec.mask == "packed":
            return PackedMask(band, layout, rows, lanes, p.mask + work.mask(), p.mask + p.mask_bytes, work.kv_len)
        kind = BandMask if self.spec.mask == "band" else StopMask
        return kind(band, layout, rows, lanes)

    def scores(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes, scale: Any) -> Scores:
        makers: dict[str, Callable[[], Scale | RowScales | SoftCap | Alibi]] = {
            "scale": lambda: self.scale_step(p, work, lanes, scale),
            "alibi": lambda: Alibi(self.tile.scores_layout, work.rows(p), lanes, p.num_qo_heads),
            "soft_cap": lambda: SoftCap(p.soft_cap),
        }
        return Scores([makers[name]() for name in self.spec.scores])

    def scale_step(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes, scale: Any) -> Scale | RowScales:
        return Scale(scale)

    def skipped(self, rows: PackedRows, stop: Int32, order: TileOrder, lanes: WarpgroupLanes) -> Int32:
        """Counts the kv tiles that the warpgroup skips: the right edge is first, and the last row sees most of it."""
        cols = self.spec.tile.cols
        end = (ptx.maximum(stop, Int32(0)) + Int32(cols - 1)) // cols
        beyond = ptx.minimum(ptx.maximum(order.end - end, Int32(0)), order.end - order.full_end)
        idle = cutlass.or_(end <= order.begin, rows.exists(lanes.warpgroup * WARPGROUP_ROWS) == cutlass.Boolean(False))
        return ptx.select(idle, order.total, beyond)

    # --- producer ---------------------------------------------------------------------------------------------------

    @cute.jit
    def producer_loop(self, p: Fa3Params, maps: Maps, rings: SmemRings) -> None:
        """Loads all tiles into the rings, then the record `NO_TILE`; one warp, or a warpgroup that gathers."""
        thread = cute.arch.thread_idx()[0]
        scheduler = (
            WarpgroupTileScheduler(p.counters, thread, PRODUCER_BARRIER)
            if self.producer_warps > 1
            else DynamicTileScheduler(p.counters, thread)
        )
        q, k, v = start(), start(), start()
        work = self.tiles.at(p, cute.arch.block_idx()[0])
        while work.head_block >= 0:
            order, source = self.order(p, work), self.source(p, maps, work)
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
            work, q = self.tiles.at(p, scheduler.broadcast_next(fetched, rings.record(q))), rings.q.next(q)
        scheduler.finish()
        ptx.grid_dependency_launch()
        rings.q.wait_empty(q)
        if thread == 0:
            QueryTile(*(Int32(x) for x in NO_TILE)).store(rings.record(q))
            sm90.barrier_arrive(rings.q.full(q))

    @cute.jit
    def load_q(
        self, p: Fa3Params, maps: Maps, rings: SmemRings, q: PipelineState, work: cutlass.Constexpr, thread: Int32
    ) -> None:
        """Loads a query tile and stores its record; rows past the end hold the next request's queries, or zeros."""
        if thread == 0:
            work.store(rings.record(q))
            rows, barrier, target = work.rows(p), rings.q.full(q), rings.q.address(q)
            sm90.barrier_expect(barrier, rings.q.slot_bytes)
            token = work.qo_start + rows.token(Int32(0))
            for column in cutlass.range_constexpr(self.memory.qk_columns):
                box = target + Int32(column * self.spec.tile.rows * LINE)
                coordinates = [Int32(column * self.memory.line_items), Int32(0), token, work.head_block]
                sm90.tma_load_4d(box, maps.q, coordinates, barrier, sm90.EVICT_FIRST)

    def load(
        self, ring: Ring, state: PipelineState, source: KVSource, operand: Any, kv_tile: Int32, page_ids: list[Int32]
    ) -> None:
        ring.wait_empty(state)
        source.copy(operand, ring.address(state), ring.full(state), kv_tile, page_ids)

    # --- MMA warpgroups ---------------------------------------------------------------------------------------------

    @cute.jit
    def consumer_loop(self, p: Fa3Params, rings: SmemRings) -> None:
        lanes = WarpgroupLanes.of()
        scale = p.scale * device_scale(p.scale0) * device_scale(p.scale1)
        if cutlass.const_expr(self.spec.tile.ping_pong):  # noqa: SIM102  (one when tracing, one at run time)
            if lanes.warpgroup == self.spec.tile.mma_warpgroups - 1:
                self.warp_scheduler_arrive(lanes)
        q, k = start(), start()
        head_block = self.next_tile(rings, q)
        while head_block >= 0:
            lanes = WarpgroupLanes.of()
            q_rows = rings.q.address(q) + lanes.warpgroup * (WARPGROUP_ROWS * LINE)
            q_scale = self.prepare_q(p, QueryTile.load(rings.record(q)), lanes, q_rows, scale)
            q_operand = self.tile.q_operand(q_rows)
            mma = self.mma_work(p, QueryTile.load(rings.record(q)), lanes, q_scale, q_operand)
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
            q = rings.q.next(q)
            head_block = self.next_tile(rings, q)

    def prepare_q(self, p: Fa3Params, work: QueryTile, lanes: WarpgroupLanes, q_rows: Int32, scale: Float32) -> Any:
        """Prepares the rows of q, for which 16-bit rows need nothing; returns the scale of their scores."""
        return scale

    def next_tile(self, rings: SmemRings, q: PipelineState) -> Int32:
        rings.q.wait_full(q)
        return cute.arch.make_warp_uniform(ptx.ld_shared_b32(rings.record(q)))

    @cute.jit
    def clear_tail(self, rings: SmemRings, mma: cutlass.Constexpr, first: PipelineState) -> None:
        """Zeroes rows of the last V tile that belong to another request or to none: 0 * NaN is not 0. That tile comes
        first.

        Tensor maps of a single request end with its keys, so that TMA fills in zeros; gathered rows are zeros too.
        """
        cols = self.spec.tile.cols
        if cutlass.const_expr(self.spec.schedule == "items" and not self.gathers):  # noqa: SIM102
            if mma.order.end * cols > mma.kv_end:
                rings.v.wait_full(first)
                valid = mma.kv_end - (mma.order.end - 1) * cols
                at = rings.v.address(first) + valid * LINE
                thread = cute.arch.thread_idx()[0] - 128
                for chunk in cutlass.range(thread, (cols - valid) * (LINE // 16), self.mma_threads, unroll=1):
                    for column in cutlass.range_constexpr(self.memory.vo_columns):
                        ptx.st_shared_v4(at + chunk * 16, column * cols * LINE, [Int32(0) for _ in range(4)])
                sm90.fence_async()
                sm90.named_sync(Int32(MMA_BARRIER), self.mma_threads)

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
        needs_recompute = sm90.any_of_warpgroup(lanes.warpgroup + VOTE_BARRIER, exceeds_slack)
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
            rescale = softmax.rescale_factors(shift, s)
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
            sm90.named_sync(lanes.warpgroup + 1, 256)

    def warp_scheduler_arrive(self, lanes: WarpgroupLanes) -> None:
        """Passes the turn to the next warpgroup."""
        if self.spec.tile.ping_pong:
            last = lanes.warpgroup == Int32(self.spec.tile.mma_warpgroups - 1)
            sm90.named_arrive(ptx.select(last, Int32(1), lanes.warpgroup + 2), 256)

    # --- output -----------------------------------------------------------------------------------------------------

    @cute.jit
    def store(
        self,
        p: Fa3Params,
        work: cutlass.Constexpr,
        lanes: WarpgroupLanes,
        out: list[Float32],
        shift: list[Float32],
        total: list[Float32],
    ) -> None:
        rows = work.rows(p)
        final_epilogue, partial_epilogue = self.epilogues(p, work)
        whole = Target(self.spec.out_dtype, p.o, p.o_stride_n, p.o_stride_h, p.lse, p.num_qo_heads)
        if cutlass.const_expr(self.spec.schedule == "items"):
            if work.partial == NO_PARTIAL:
                self.store_type(self.tile.output_layout, lanes, rows, whole, final_epilogue).write(out, shift, total)
            else:
                slot = Int64(work.partial) * Int64(p.head_blocks) + Int64(work.head_block)
                first = slot * Int64(self.spec.tile.rows)
                slots = Partials(p.o_partial, p.lse_partial, first, self.spec.head_dim_vo)
                self.store_type(self.tile.output_layout, lanes, rows, slots, partial_epilogue).write(out, shift, total)
        elif cutlass.const_expr(self.spec.split):
            slab = Int64(work.partial) * Int64(p.qo_len) * Int64(p.num_qo_heads)
            o, lse = p.o + slab * (self.spec.head_dim_vo * 4), p.lse + slab * 4
            partial = Target("float32", o, p.o_stride_n, p.o_stride_h, lse, p.num_qo_heads)
            self.store_type(self.tile.output_layout, lanes, rows, partial, partial_epilogue).write(out, shift, total)
        else:
            self.store_type(self.tile.output_layout, lanes, rows, whole, final_epilogue).write(out, shift, total)

    def epilogues(self, p: Fa3Params, work: QueryTile) -> tuple[FinalEpilogue, PartialEpilogue]:
        """Returns the row epilogues of final and of partial outputs."""
        return FinalEpilogue(p.sinks, p.v_scale * device_scale(p.v_scale_ptr), p.lse_scale), PartialEpilogue()
