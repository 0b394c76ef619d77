"""FlashAttention-3 for Hopper (Shah et al. 2024): TMA, wgmma and specialised warps.

A CTA stays on its SM and works through query tiles of `tile.rows` packed rows. A producer warp copies:

    producer     K0 Q V0 K1 V1 K2 V2 ...                       (rings of slots, across query tiles)
    math group   S0 | S1 + O(P0 V0), softmax 1 | S2 + O(P1 V1), softmax 2 | ... | O(Pn Vn) | store

The product of the next scores is issued before that of the last probabilities, and softmax runs while the second is
still under way. Math groups of 64 rows take turns at issuing, so that one's softmax runs under another's products. A
group that sees nothing of the first kv tiles, which lie at the right edge of the mask, passes over them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, GridConstant, Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.epilogue import Finish, Partials, Target, Unfinished
from cute_attn.kernels.blocks.masks import BandMask, PackedMask, StopMask, TileOrder
from cute_attn.kernels.blocks.pipeline import Place, Ring, start
from cute_attn.kernels.blocks.rows import Divisor, PackedRows
from cute_attn.kernels.blocks.scalars import device_scale, zeros
from cute_attn.kernels.blocks.scores import Alibi, RowScales, Scale, Scores, SoftCap
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import NOTHING, Draws, GridTiles, ItemTiles, QueryTile, TeamDraws
from cute_attn.kernels.fa3.parts import gathered_kv
from cute_attn.kernels.fa3.parts.epilogue import GroupStore
from cute_attn.kernels.fa3.parts.gathered_kv import GatheredPages, NarrowPages, PageRows
from cute_attn.kernels.fa3.parts.rings import Shared
from cute_attn.kernels.fa3.parts.tma_kv import Boxes, DenseBoxes, PagedBoxes
from cute_attn.kernels.fa3.parts.wgmma import ROWS, AnyLanes, GroupLanes, GroupTile
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.formats import KV_BITS, LINE
from cute_attn.schedule.records import NO_PARTIAL

MATH_BARRIER = 4  # named barrier of all math threads; 1 to 3 are their groups' turns
FIRST_VOTE = 5  # and from here on one a group
PRODUCER_BARRIER = 8

KVSource = DenseBoxes | PagedBoxes | GatheredPages | NarrowPages


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
    group: Int32  # heads in a tile's rows
    group_multiplier: Int32
    group_shift: Int32
    kv_group: Int32  # blocks of such heads that share a kv head
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
    # fp8: fp32 a head
    scale_q: Int64
    scale_k: Int64
    scale_v: Int64


class Maps(NamedTuple):
    """Generic addresses of the tensor maps: of q [a line, heads of a tile, tokens, blocks of heads], of k and v
    [a line, tokens, kv heads, pages].
    """

    q: Int64
    k: Int64
    v: Int64


class State(NamedTuple):
    """A math group's accumulators between kv tiles, and its place in K's ring; in V's it is one tile behind."""

    out: list[Float32]
    p: list[Int32]
    shift: list[Float32]
    total: list[Float32]
    k: Place


@dataclass(frozen=True)
class MathWork:
    """One query tile as a math group sees it."""

    lanes: GroupLanes
    softmax: OnlineSoftmax
    scores: Scores
    mask: BandMask
    order: TileOrder
    skipped: Int32  # kv tiles at the beginning of the order that this group's rows do not see
    kv_end: Int32
    q: Int32


class Fa3Program:
    params = Fa3Params
    maps = Maps._fields
    storer = GroupStore
    gathered: type[GatheredPages | NarrowPages] = GatheredPages

    def __init__(self, spec: Fa3Spec, arch: str) -> None:
        self.spec = spec
        self.memory = HopperMemory.of(spec)
        self.tile = self.group_tile()
        kind = GridTiles if spec.schedule == "grid" else ItemTiles
        self.tiles: GridTiles | ItemTiles = kind(spec.tile.rows, spec.tile.cols)
        self.block = (spec.tile.threads, 1, 1)
        self.smem_bytes = self.memory.bytes
        self.math_threads = 128 * spec.tile.math_groups
        self.gathers = spec.kv == "gathered"
        self.producers = gathered_kv.WARPS if self.gathers else 1

    def group_tile(self) -> GroupTile:
        return GroupTile(self.spec.dtype, self.memory)

    def compile_args(self) -> tuple[Any, ...]:
        return (zeros(Fa3Params), Int32(1), Int32(1), Int32(1))

    @cute.jit
    def __call__(self, params: Fa3Params, grid_x: Int32, grid_y: Int32, grid_z: Int32) -> None:
        # Launches bring tensor maps of their own; this one gives the parameters their type.
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
        shared = self.shared(base)
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            for tensor_map in maps:
                sm90.prefetch_tensor_map(tensor_map)
            self.initialise(shared)
            sm90.fence_barrier_init()
        ptx.sync_threads()
        ptx.grid_dependency_wait()
        if thread < 128:
            sm90.release_registers(self.spec.registers[0])
            self.feed(params, maps, shared, thread)
        else:
            self.compute(params, shared, thread)

    def shared(self, base: Int32) -> Shared:
        return Shared.of(self.memory, base, self.producers)

    def initialise(self, shared: Shared) -> None:
        for ring in (shared.q, shared.k, shared.v):
            ring.initialise(self.math_threads // 32)

    @cute.jit
    def feed(self, params: Fa3Params, maps: Maps, shared: Shared, thread: Int32) -> None:
        """The first warpgroup."""
        if thread < 32 * self.producers:
            self.produce(params, maps, shared)

    def compute(self, params: Fa3Params, shared: Shared, thread: Int32) -> None:
        """The warpgroups after it."""
        self.do_math(params, shared)

    def do_math(self, params: Fa3Params, shared: Shared) -> None:
        sm90.claim_registers(self.spec.registers[1])
        self.consume(params, shared)

    # --- composition ------------------------------------------------------------------------------------------------

    def order(self, p: Fa3Params, work: QueryTile) -> TileOrder:
        """Of the whole tile; without the mask's bits, which hide no tile."""
        shape = self.spec.tile
        first, last = work.kv_begin // shape.cols, (work.kv_end + Int32(shape.cols - 1)) // shape.cols
        order = work.band(p).tiles(work.rows(p), shape.rows, shape.cols, first, last)
        if self.spec.mask == "stop":  # its tiles simply go down; ptxas is told
            return TileOrder(first, first, ptx.maximum(order.full_end, first), ptx.maximum(order.end, first))
        return PackedMask.all_masked(order) if self.spec.mask == "packed" else order

    def source(self, p: Fa3Params, maps: Maps, work: QueryTile) -> KVSource:
        cols, thread = self.spec.tile.cols, cute.arch.thread_idx()[0]
        kv_head = Divisor(p.kv_group, p.kv_group_multiplier, p.kv_group_shift).quotient(work.head_block)
        k, v = self.boxes(maps)
        if self.spec.kv == "dense":
            return DenseBoxes(cols, work.kv_start, kv_head, thread, k, v)
        page_size = Divisor(p.page_size, p.page_multiplier, p.page_shift)
        table = p.kv_indices + Int64(work.kv_start) * Int64(4)
        if self.spec.kv == "paged":
            return PagedBoxes(cols, kv_head, thread, work.kv_end, table, page_size, p.box_rows, k, v)
        k_base, v_base = p.k_address + Int64(kv_head) * p.k_stride_h, p.v_address + Int64(kv_head) * p.v_stride_h
        k_rows = PageRows(k_base, p.k_page_stride, p.k_stride_n, self.chunks(self.spec.head_dim_qk))
        v_rows = PageRows(v_base, p.v_page_stride, p.v_stride_n, self.chunks(self.spec.head_dim_vo))
        return self.gathered(cols, thread, work.kv_end, table, page_size, k_rows, v_rows)

    def chunks(self, head_dim: int) -> int:
        """Of a row of K or V as stored."""
        return head_dim * KV_BITS[self.spec.kv_dtype] // 8 // gathered_kv.CHUNK

    def boxes(self, maps: Maps) -> tuple[Boxes, Boxes]:
        memory = self.memory
        k, v = ((maps.k, memory.qk_columns), (maps.v, memory.vo_columns))
        return Boxes(*k, memory.line_items, LINE), Boxes(*v, memory.line_items, LINE)

    def math_work(self, p: Fa3Params, work: QueryTile, lanes: GroupLanes, softmax_scale: Any, q: Any) -> MathWork:
        rows, band, order = work.rows(p), work.band(p), self.order(p, work)
        return MathWork(
            lanes=lanes,
            softmax=self.softmax(p, work, lanes, softmax_scale),
            scores=self.scores(p, work, lanes, softmax_scale),
            mask=self.mask(p, work, lanes),
            order=order,
            skipped=self.skipped(rows, band.stop(rows.last_token_from(lanes.group * ROWS, ROWS)), order, lanes),
            kv_end=work.kv_end,
            q=q,
        )

    def softmax(self, p: Fa3Params, work: QueryTile, lanes: GroupLanes, scale: Any) -> OnlineSoftmax:
        return OnlineSoftmax(self.tile, Float32(ptx.LOG2E) if self.spec.scores else scale)

    def mask(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes) -> BandMask:
        band, rows = work.band(p), work.rows(p)
        if self.spec.mask == "packed":
            return PackedMask(band, self.tile, rows, lanes, p.mask + work.mask(), p.mask + p.mask_bytes, work.kv_len)
        kind = BandMask if self.spec.mask == "band" else StopMask
        return kind(band, self.tile, rows, lanes)

    def scores(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes, scale: Any) -> Scores:
        makers: dict[str, Callable[[], Scale | RowScales | SoftCap | Alibi]] = {
            "scale": lambda: self.scale_step(p, work, lanes, scale),
            "alibi": lambda: Alibi(self.tile, work.rows(p), lanes, p.num_qo_heads),
            "soft_cap": lambda: SoftCap(p.soft_cap),
        }
        return Scores([makers[name]() for name in self.spec.scores])

    def scale_step(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes, scale: Any) -> Scale | RowScales:
        return Scale(scale)

    def skipped(self, rows: PackedRows, stop: Int32, order: TileOrder, lanes: GroupLanes) -> Int32:
        """The right edge comes first in the order; of a group's rows, the last one sees most of it."""
        cols = self.spec.tile.cols
        end = (ptx.maximum(stop, Int32(0)) + Int32(cols - 1)) // cols
        beyond = ptx.minimum(ptx.maximum(order.end - end, Int32(0)), order.end - order.full_end)
        idle = cutlass.or_(end <= order.begin, rows.exists(lanes.group * ROWS) == cutlass.Boolean(False))
        return ptx.select(idle, order.total, beyond)

    # --- producer ---------------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, p: Fa3Params, maps: Maps, shared: Shared) -> None:
        """One warp, or a warpgroup that gathers: tiles into the rings, then word that there are no more."""
        thread = cute.arch.thread_idx()[0]
        team = self.producers > 1
        draws = TeamDraws(p.counters, thread, PRODUCER_BARRIER) if team else Draws(p.counters, thread)
        q, k, v = start(), start(), start()
        work = self.tiles.at(p, cute.arch.block_idx()[0])
        while work.head_block >= 0:
            order, source = self.order(p, work), self.source(p, maps, work)
            first = ptx.maximum(order.at(Int32(0)), Int32(0))  # -1 where there is no tile at all
            pages = source.look_up(first)
            if order.total > 0:
                self.load(shared.arriving_k, k, source, source.k, first, pages)
            shared.q.wait_empty(q)
            self.load_q(p, maps, shared, q, work, thread)
            if order.total > 0:
                source.landed([shared.arriving_k.full(k)])
            for step in cutlass.range(1, order.total, unroll=1):
                following = source.look_up(order.at(step))
                self.load(shared.arriving_v, v, source, source.v, order.at(step - 1), pages)
                k = shared.arriving_k.next(k)
                self.load(shared.arriving_k, k, source, source.k, order.at(step), following)
                source.landed([shared.arriving_v.full(v), shared.arriving_k.full(k)])
                v, pages = shared.arriving_v.next(v), following
            drawn = draws.draw()
            if order.total > 0:
                self.load(shared.arriving_v, v, source, source.v, order.at(order.total - 1), pages)
                source.landed([shared.arriving_v.full(v)])
                v, k = shared.arriving_v.next(v), shared.arriving_k.next(k)
            work, q = self.tiles.at(p, draws.following(drawn, shared.record(q))), shared.q.next(q)
        draws.stop()
        ptx.grid_dependency_launch()
        shared.q.wait_empty(q)
        if thread == 0:
            QueryTile(*(Int32(x) for x in NOTHING)).store(shared.record(q))
            sm90.barrier_arrive(shared.q.full(q))

    @cute.jit
    def load_q(
        self, p: Fa3Params, maps: Maps, shared: Shared, q: Place, work: cutlass.Constexpr, thread: Int32
    ) -> None:
        """A query tile and its description; rows past the end are the next request's, or zeros."""
        if thread == 0:
            work.store(shared.record(q))
            rows, barrier, target = work.rows(p), shared.q.full(q), shared.q.address(q)
            sm90.barrier_expect(barrier, shared.q.slot_bytes)
            token = work.qo_start + rows.token(Int32(0))
            for column in cutlass.range_constexpr(self.memory.qk_columns):
                box = target + Int32(column * self.spec.tile.rows * LINE)
                coordinates = [Int32(column * self.memory.line_items), Int32(0), token, work.head_block]
                sm90.tma_load_4d(box, maps.q, coordinates, barrier, sm90.EVICT_FIRST)

    def load(
        self, ring: Ring, place: Place, source: KVSource, operand: Any, kv_tile: Int32, pages: list[Int32]
    ) -> None:
        ring.wait_empty(place)
        source.copy(operand, ring.address(place), ring.full(place), kv_tile, pages)

    # --- math groups ------------------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, p: Fa3Params, shared: Shared) -> None:
        lanes = GroupLanes.of()
        scale = p.scale * device_scale(p.scale0) * device_scale(p.scale1)
        if cutlass.const_expr(self.spec.tile.ping_pong):  # noqa: SIM102  (one when tracing, one at run time)
            if lanes.group == self.spec.tile.math_groups - 1:
                self.end_turn(lanes)
        q, k = start(), start()
        head_block = self.next_tile(shared, q)
        while head_block >= 0:
            lanes = GroupLanes.of()
            q_rows = shared.q.address(q) + lanes.group * (ROWS * LINE)
            q_scale = self.ready_q(p, QueryTile.load(shared.record(q)), lanes, q_rows, scale)
            q_operand = self.tile.q_operand(q_rows)
            math = self.math_work(p, QueryTile.load(shared.record(q)), lanes, q_scale, q_operand)
            out, shift = self.tile.zeros(self.tile.d_blocks), [Float32(float("inf")) for _ in range(2)]
            total = [Float32(0.0) for _ in range(2)]
            if math.order.total > 0:
                self.clear_tail(shared, math, k)
                k = self.pass_over(shared, math, k)
            if math.skipped < math.order.total:
                state = self.attend(shared, math, k)
                shared.q.release(q, lanes.lane)
                out = self.last_output(shared, math, state)
                shift, total, k = state.shift, state.total, state.k
            else:
                shared.q.release(q, lanes.lane)
            self.store(p, QueryTile.load(shared.record(q)), GroupLanes.of(), out, shift, total)
            q = shared.q.next(q)
            head_block = self.next_tile(shared, q)

    def ready_q(self, p: Fa3Params, work: QueryTile, lanes: GroupLanes, q_rows: Int32, scale: Float32) -> Any:
        """16-bit rows are as they shall be; the scale of their scores."""
        return scale

    def next_tile(self, shared: Shared, q: Place) -> Int32:
        shared.q.wait_full(q)
        return cute.arch.make_warp_uniform(ptx.ld_shared_b32(shared.record(q)))

    @cute.jit
    def clear_tail(self, shared: Shared, math: cutlass.Constexpr, first: Place) -> None:
        """Rows of the last V tile that are another request's, or nobody's, become zeros: 0 * NaN is no 0.

        That tile comes first. A single request's are zeros already: its tensor maps end there. So are gathered ones.
        """
        cols = self.spec.tile.cols
        if cutlass.const_expr(self.spec.schedule == "items" and not self.gathers):  # noqa: SIM102
            if math.order.end * cols > math.kv_end:
                shared.v.wait_full(first)
                valid = math.kv_end - (math.order.end - 1) * cols
                at = shared.v.address(first) + valid * LINE
                thread = cute.arch.thread_idx()[0] - 128
                for chunk in cutlass.range(thread, (cols - valid) * (LINE // 16), self.math_threads, unroll=1):
                    for column in cutlass.range_constexpr(self.memory.vo_columns):
                        ptx.st_shared_v4(at + chunk * 16, column * cols * LINE, [Int32(0) for _ in range(4)])
                sm90.fence_async()
                sm90.named_sync(Int32(MATH_BARRIER), self.math_threads)

    @cute.jit
    def pass_over(self, shared: Shared, math: cutlass.Constexpr, k: Place) -> Place:
        """The kv tiles that only other groups see."""
        for step in cutlass.range(0, math.skipped, unroll=1):
            for ring in (shared.k, shared.v):
                ring.wait_full(k)
                ring.release(k, math.lanes.lane)
            if step + 1 < math.order.total:
                self.await_turn(math.lanes)
                self.end_turn(math.lanes)
            k = shared.k.next(k)
        return k

    @cute.jit
    def attend(self, shared: Shared, math: cutlass.Constexpr, k: Place) -> Any:
        """All kv tiles of a query tile but the last one's output."""
        step0 = math.skipped + 1
        state = self.first(shared, math, k)
        masked, total = ptx.maximum(math.order.masked, step0), math.order.total
        for step in cutlass.range(step0, masked, unroll=1):
            state = self.step(shared, math, state, math.order.at(step), True)
        for step in cutlass.range(masked, total, unroll=1):
            state = self.step(shared, math, state, math.order.full_at(step), False)
        return state

    def last_output(self, shared: Shared, math: MathWork, state: State) -> list[Float32]:
        v = shared.v.previous(state.k)
        shared.v.wait_full(v)
        out = self.tile.accumulate(state.out, state.p, self.tile.v_operand(shared.v.address(v)))
        out = sm90.wgmma_wait(0, out, state.p)
        shared.v.release(v, math.lanes.lane)
        return out

    def first(self, shared: Shared, math: MathWork, k: Place) -> State:
        """Scores and softmax of the first kv tile; it may be masked."""
        softmax = math.softmax
        shared.k.wait_full(k)
        s = sm90.wgmma_wait(0, self.tile.scores(math.q, self.tile.k_operand(shared.k.address(k))))
        shared.k.release(k, math.lanes.lane)
        s = self.seen(math, s, math.order.at(math.skipped), True)
        shift = softmax.first_shift(s)
        s = softmax.exponentials(s, shift, may_be_empty=True)
        total = softmax.sums(s, [Float32(0.0) for _ in range(2)])
        out = self.tile.zeros(self.tile.d_blocks)
        return State(out, self.tile.probabilities(s), shift, total, shared.k.next(k))

    def step(self, shared: Shared, math: MathWork, state: State, kv_tile: Int32, masked: bool) -> State:
        """Scores of this kv tile, output of the one before it; softmax while the latter is under way.

        Exponents are relative to the anchors of earlier tiles, whatever these scores are: their maximum is not looked
        for. Sums tell afterwards where that went wrong, and the tile is done again: K stays in its slot till then.
        """
        k, v, lanes, softmax = state.k, shared.v.previous(state.k), math.lanes, math.softmax
        k_at, v_at = self.tile.k_operand(shared.k.address(k)), self.tile.v_operand(shared.v.address(v))
        shared.k.wait_full(k)
        self.await_turn(lanes)
        s = self.tile.scores(math.q, k_at)
        shared.v.wait_full(v)
        out = self.tile.accumulate(state.out, state.p, v_at)
        self.end_turn(lanes)
        s = self.seen(math, sm90.wgmma_wait(1, s), kv_tile, masked)
        s = softmax.exponentials(s, softmax.finite(state.shift) if masked else state.shift, may_be_empty=False)
        sums = softmax.sums(s, [Float32(0.0) for _ in range(2)])
        too_high = softmax.too_high(sums)
        # Before the wait: exponentials, which are to run under it, are not put off till after it.
        again = sm90.any_of_group(lanes.group + FIRST_VOTE, too_high)
        out = sm90.wgmma_wait(0, out, state.p)
        shared.v.release(v, lanes.lane)
        before = State(out, self.tile.probabilities(s), state.shift, state.total, k)
        after, sums = self.raised(shared, math, before, sums, again, k_at, kv_tile, masked)
        shared.k.release(k, lanes.lane)
        total = [a + b for a, b in zip(after.total, sums, strict=True)]
        return State(after.out, after.p, after.shift, total, shared.k.next(k))

    def seen(self, math: MathWork, s: list[Float32], kv_tile: Int32, masked: bool) -> list[Float32]:
        kv_start = kv_tile * self.spec.tile.cols
        s = math.scores.apply(s, kv_start)
        return math.mask.apply(s, kv_start) if masked else s

    @cute.jit
    def raised(
        self,
        shared: cutlass.Constexpr,
        math: cutlass.Constexpr,
        state: cutlass.Constexpr,
        sums: list[Float32],
        again: cutlass.Boolean,
        k_at: Int32,
        kv_tile: Int32,
        masked: cutlass.Constexpr,
    ) -> Any:
        """The tile's probabilities and sums with anchors that fit it. Probabilities, half the registers of scores, are
        what is replaced: otherwise ptxas spills.
        """
        out, p, shift, total = state.out, state.p, state.shift, state.total
        if again:
            softmax = math.softmax
            # Afresh, lest everything that depends on them stay in registers.
            q, k, kv_tile = self.tile.afresh(math.q), *(cute.arch.make_warp_uniform(x) for x in (k_at, kv_tile))
            s = self.seen(math, sm90.wgmma_wait(0, self.tile.scores(q, k)), kv_tile, masked)
            risen = softmax.rise(shift, s)
            s = softmax.exponentials(s, risen.shift, may_be_empty=masked)
            p, sums = self.tile.probabilities(s), softmax.sums(s, [Float32(0.0) for _ in range(2)])
            shift = risen.shift
            total = [t * factor for t, factor in zip(total, risen.factors, strict=True)]
            out = self.rescaled(shared, out, risen.factors)
        return State(out, p, shift, total, state.k), sums

    def rescaled(self, shared: Shared, out: list[Float32], factors: list[Float32]) -> list[Float32]:
        return [x * factors[i % 4 // 2] for i, x in enumerate(out)]

    def await_turn(self, lanes: GroupLanes) -> None:
        if self.spec.tile.ping_pong:
            sm90.named_sync(lanes.group + 1, 256)

    def end_turn(self, lanes: GroupLanes) -> None:
        if self.spec.tile.ping_pong:
            last = lanes.group == Int32(self.spec.tile.math_groups - 1)
            sm90.named_arrive(ptx.select(last, Int32(1), lanes.group + 2), 256)

    # --- output -----------------------------------------------------------------------------------------------------

    @cute.jit
    def store(
        self,
        p: Fa3Params,
        work: cutlass.Constexpr,
        lanes: GroupLanes,
        out: list[Float32],
        shift: list[Float32],
        total: list[Float32],
    ) -> None:
        rows = work.rows(p)
        finish, unfinished = self.finishes(p, work)
        whole = Target(self.spec.out_dtype, p.o, p.o_stride_n, p.o_stride_h, p.lse, p.num_qo_heads)
        if cutlass.const_expr(self.spec.schedule == "items"):
            if work.partial == NO_PARTIAL:
                self.storer(self.tile, lanes, rows, whole, finish).write(out, shift, total)
            else:
                slot = Int64(work.partial) * Int64(p.head_blocks) + Int64(work.head_block)
                first = slot * Int64(self.spec.tile.rows)
                slots = Partials(p.o_partial, p.lse_partial, first, self.spec.head_dim_vo)
                self.storer(self.tile, lanes, rows, slots, unfinished).write(out, shift, total)
        elif cutlass.const_expr(self.spec.split):
            slab = Int64(work.partial) * Int64(p.qo_len) * Int64(p.num_qo_heads)
            o, lse = p.o + slab * (self.spec.head_dim_vo * 4), p.lse + slab * 4
            partial = Target("float32", o, p.o_stride_n, p.o_stride_h, lse, p.num_qo_heads)
            self.storer(self.tile, lanes, rows, partial, unfinished).write(out, shift, total)
        else:
            self.storer(self.tile, lanes, rows, whole, finish).write(out, shift, total)

    def finishes(self, p: Fa3Params, work: QueryTile) -> tuple[Finish, Unfinished]:
        """What whole rows get, and what partial ones."""
        return Finish(p.sinks, p.v_scale * device_scale(p.v_scale_ptr), p.lse_scale), Unfinished()
