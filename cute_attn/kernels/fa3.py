"""FlashAttention-3 for Hopper (Shah et al. 2024): TMA, wgmma and specialised warps.

A CTA stays on its SM and works through query tiles of `tile.rows` tokens of one head. A producer thread copies:

    producer     K0 Q V0 K1 V1 K2 V2 ...                       (rings of `stages` slots, across tiles)
    math group   S0 | S1 + O(P0 V0), softmax 1 | S2 + O(P1 V1), softmax 2 | ... | O(Pn Vn) | store

The product of the next scores is issued before that of the last probabilities, and softmax runs while the second is
still under way. Math groups of 64 rows take turns at issuing, so that one's softmax runs under another's products.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, GridConstant, Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.epilogue import Finish
from cute_attn.kernels.blocks.masks import Band, BandMask, StopMask, TileOrder
from cute_attn.kernels.blocks.pipeline import Place, Ring, start
from cute_attn.kernels.blocks.rows import Divisor, HeadRows
from cute_attn.kernels.blocks.scalars import device_scale, zeros
from cute_attn.kernels.blocks.schedule import DenseTiles, DynamicSchedule, StaticSchedule, TileWork
from cute_attn.kernels.blocks.softmax import OnlineSoftmax, Risen
from cute_attn.kernels.blocks.store import GroupStore
from cute_attn.kernels.blocks.wgmma import GroupLanes, GroupTile
from cute_attn.kernels.memory import LINE, HopperMemory
from cute_attn.kernels.spec import Fa3Spec

NO_WORK = -1


class Fa3Params(NamedTuple):
    """Kernel parameters after the tensor maps, in order. Addresses are Int64, 0 where absent; strides are bytes."""

    o: Int64
    lse: Int64
    counter: Int64
    scale0: Int64
    scale1: Int64
    v_scale_ptr: Int64
    sinks: Int64
    o_stride_b: Int64
    o_stride_n: Int64
    o_stride_h: Int64
    qo_len: Int32
    kv_len: Int32
    right: Int32
    left: Int32
    total_tiles: Int32
    last_block: Int32
    section_tiles: Int32
    section_tiles_multiplier: Int32
    section_tiles_shift: Int32
    section_heads: Int32
    section_heads_multiplier: Int32
    section_heads_shift: Int32
    num_qo_heads: Int32
    num_qo_heads_multiplier: Int32
    num_qo_heads_shift: Int32
    group: Int32
    group_multiplier: Int32
    group_shift: Int32
    scale: Float32
    v_scale: Float32


class Maps(NamedTuple):
    """Generic addresses of the tensor maps of q, k and v: [64 elements, tokens, heads, batch]."""

    q: Int64
    k: Int64
    v: Int64


class State(NamedTuple):
    """A math group's accumulators between kv tiles, and its places in the rings; V is one tile behind K."""

    out: list[Float32]
    p: list[Int32]
    shift: list[Float32]
    total: list[Float32]
    k: Place
    v: Place


@dataclass(frozen=True)
class Shared:
    """What producer and math groups meet at."""

    q: Ring
    k: Ring
    v: Ring
    work: Int32

    @classmethod
    def of(cls, memory: HopperMemory, base: Int32) -> "Shared":
        stages, barriers = memory.tile.stages, base + Int32(memory.barriers)
        return cls(
            Ring(1, memory.q_bytes, base, barriers),
            Ring(stages, memory.k_bytes, base + Int32(memory.k_ring), barriers + Int32(16)),
            Ring(stages, memory.v_bytes, base + Int32(memory.v_ring), barriers + Int32(16 + 16 * stages)),
            base + Int32(memory.work),
        )


@dataclass(frozen=True)
class MathWork:
    """One query tile as a math group sees it."""

    rows: HeadRows
    mask: BandMask
    order: TileOrder
    q: Int32


class Fa3Program:
    params = Fa3Params
    maps = Maps._fields

    def __init__(self, spec: Fa3Spec, arch: str) -> None:
        self.spec = spec
        self.memory = HopperMemory.of(spec)
        self.tile = GroupTile(spec.dtype, self.memory)
        self.block = (spec.tile.threads, 1, 1)
        self.smem_bytes = self.memory.bytes
        self.math_threads = 128 * spec.tile.math_groups

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
        shared = Shared.of(self.memory, base)
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            for tensor_map in maps:
                sm90.prefetch_tensor_map(tensor_map)
            for ring in (shared.q, shared.k, shared.v):
                ring.initialise(self.math_threads // 32)
            sm90.fence_barrier_init()
        ptx.sync_threads()
        ptx.grid_dependency_wait()
        producer_registers, math_registers = self.spec.tile.registers
        if thread < 128:
            sm90.release_registers(producer_registers)
            if thread == 0:
                self.produce(params, maps, shared)
        else:
            sm90.claim_registers(math_registers)
            self.consume(params, shared)

    # --- composition ------------------------------------------------------------------------------------------------

    def tiles(self, p: Fa3Params) -> DenseTiles:
        return DenseTiles(
            p.total_tiles,
            Divisor(p.section_tiles, p.section_tiles_multiplier, p.section_tiles_shift),
            Divisor(p.section_heads, p.section_heads_multiplier, p.section_heads_shift),
            Divisor(p.num_qo_heads, p.num_qo_heads_multiplier, p.num_qo_heads_shift),
            Divisor(p.group, p.group_multiplier, p.group_shift),
            p.last_block,
            self.spec.tile.rows,
        )

    def schedule(self, p: Fa3Params) -> StaticSchedule | DynamicSchedule:
        return StaticSchedule() if self.spec.schedule == "static" else DynamicSchedule(p.counter)

    def rows(self, p: Fa3Params, work: TileWork) -> HeadRows:
        return HeadRows(work.first, p.qo_len, work.head)

    def mask(self, p: Fa3Params, rows: HeadRows, lanes: GroupLanes) -> BandMask:
        kind = BandMask if self.spec.mask == "band" else StopMask
        return kind(Band(p.kv_len, p.left, p.right), self.tile, rows, lanes)

    def order(self, p: Fa3Params, rows: HeadRows) -> TileOrder:
        tile, band = self.spec.tile, Band(p.kv_len, p.left, p.right)
        return band.tiles(rows, tile.rows, tile.cols, Int32(0), Int32(1 << 24))

    # --- producer ---------------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, p: Fa3Params, maps: Maps, shared: Shared) -> None:
        """One thread: tiles into the rings, then word that there are no more."""
        index, tiles, schedule = cute.arch.block_idx()[0], self.tiles(p), self.schedule(p)
        q, k, v = start(), start(), start()
        while index < p.total_tiles:
            work = tiles.decode(index)
            order = self.order(p, self.rows(p, work))
            if order.total > 0:
                self.load_k(maps, shared.k, k, work, order.at(Int32(0)))
            shared.q.wait_empty(q)
            ptx.st_shared_b32(shared.work, 0, index)
            self.load_q(maps, shared.q, q, work)
            drawn = schedule.draw(index)
            for step in cutlass.range(1, order.total, unroll=1):
                self.load_v(maps, shared.v, v, work, order.at(step - 1))
                v, k = shared.v.next(v), shared.k.next(k)
                self.load_k(maps, shared.k, k, work, order.at(step))
            if order.total > 0:
                self.load_v(maps, shared.v, v, work, order.at(order.total - 1))
                v, k = shared.v.next(v), shared.k.next(k)
            q = shared.q.next(q)
            index = schedule.following(drawn, p.total_tiles)
        shared.q.wait_empty(q)
        ptx.st_shared_b32(shared.work, 0, Int32(NO_WORK))
        sm90.barrier_arrive(shared.q.full(q))

    def load_q(self, maps: Maps, ring: Ring, place: Place, work: TileWork) -> None:
        rows = self.spec.tile.rows
        coordinates = work.first, work.head, work.batch
        self.load(maps.q, ring, place, rows, self.spec.head_dim_qk, coordinates, sm90.EVICT_FIRST)

    def load_k(self, maps: Maps, ring: Ring, place: Place, work: TileWork, kv_tile: Int32) -> None:
        ring.wait_empty(place)
        cols = self.spec.tile.cols
        coordinates = kv_tile * cols, work.kv_head, work.batch
        self.load(maps.k, ring, place, cols, self.spec.head_dim_qk, coordinates, sm90.EVICT_LAST)

    def load_v(self, maps: Maps, ring: Ring, place: Place, work: TileWork, kv_tile: Int32) -> None:
        ring.wait_empty(place)
        cols = self.spec.tile.cols
        coordinates = kv_tile * cols, work.kv_head, work.batch
        self.load(maps.v, ring, place, cols, self.spec.head_dim_vo, coordinates, sm90.EVICT_LAST)

    def load(
        self,
        tensor_map: Int64,
        ring: Ring,
        place: Place,
        rows: int,
        head_dim: int,
        coordinates: tuple[Int32, Int32, Int32],
        policy: int,
    ) -> None:
        """A tile, a box of 64 elements after the other; rows past a request's end become zeros."""
        barrier, target = ring.full(place), ring.address(place)
        sm90.barrier_expect(barrier, ring.slot_bytes)
        for column in range(head_dim // 64):
            box = target + Int32(column * rows * LINE)
            sm90.tma_load_4d(box, tensor_map, [Int32(column * 64), *coordinates], barrier, policy)

    # --- math groups ------------------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, p: Fa3Params, shared: Shared) -> None:
        lanes, tiles = GroupLanes.of(), self.tiles(p)
        softmax = OnlineSoftmax(self.tile, p.scale * device_scale(p.scale0) * device_scale(p.scale1))
        finish = Finish(p.sinks, p.v_scale * device_scale(p.v_scale_ptr))
        if cutlass.const_expr(self.spec.tile.ping_pong):  # noqa: SIM102  (one when tracing, one at run time)
            if lanes.group == self.spec.tile.math_groups - 1:
                self.end_turn(lanes)
        q, k = start(), start()
        index = self.next_tile(shared, q)
        while index >= 0:
            work = tiles.decode(index)
            rows = self.rows(p, work)
            q_rows = shared.q.data + lanes.group * (64 * LINE)
            math = MathWork(rows, self.mask(p, rows, lanes), self.order(p, rows), q_rows)
            out, shift = self.tile.zeros(self.tile.d_blocks), [Float32(float("inf")) for _ in range(2)]
            total = [Float32(0.0) for _ in range(2)]
            if math.order.total > 0:
                out, shift, total, k = self.attend(shared, lanes, softmax, math, k)
            shared.q.release(q, lanes.lane)
            q = shared.q.next(q)
            store = GroupStore(self.tile, self.spec.out_dtype, lanes, rows, finish, p, work.batch)
            store.write(out, shift, total)
            index = self.next_tile(shared, q)

    def next_tile(self, shared: Shared, q: Place) -> Int32:
        shared.q.wait_full(q)
        return cute.arch.make_warp_uniform(ptx.ld_shared_b32(shared.work))

    @cute.jit
    def attend(self, shared: Shared, lanes: GroupLanes, softmax: OnlineSoftmax, math: MathWork, k: Place) -> Any:
        """All kv tiles of a query tile: (output, shifts, sums, place of the next K)."""
        state = self.first(shared, lanes, softmax, math, k)
        masked, total = ptx.maximum(math.order.masked, Int32(1)), math.order.total
        for step in cutlass.range(1, masked, unroll=1):
            state = self.step(shared, lanes, softmax, math, state, math.order.at(step), True)
        for step in cutlass.range(masked, total, unroll=1):
            state = self.step(shared, lanes, softmax, math, state, math.order.full_at(step), False)
        shared.v.wait_full(state.v)
        out = self.tile.accumulate(state.out, state.p, shared.v.address(state.v))
        out = sm90.wgmma_wait(0, out, state.p)
        shared.v.release(state.v, lanes.lane)
        return out, state.shift, state.total, state.k

    def first(self, shared: Shared, lanes: GroupLanes, softmax: OnlineSoftmax, math: MathWork, k: Place) -> State:
        """Scores and softmax of the first kv tile; it may be masked."""
        shared.k.wait_full(k)
        s = sm90.wgmma_wait(0, self.tile.scores(math.q, shared.k.address(k)))
        shared.k.release(k, lanes.lane)
        s = math.mask.apply(s, math.order.at(Int32(0)) * self.spec.tile.cols)
        shift = softmax.first_shift(s)
        s = softmax.exponentials(s, shift, may_be_empty=True)
        total = softmax.sums(s, [Float32(0.0) for _ in range(2)])
        out = self.tile.zeros(self.tile.d_blocks)
        return State(out, self.tile.probabilities(s), shift, total, shared.k.next(k), k)

    def step(
        self,
        shared: Shared,
        lanes: GroupLanes,
        softmax: OnlineSoftmax,
        math: MathWork,
        state: State,
        kv_tile: Int32,
        masked: bool,
    ) -> State:
        """Scores of this kv tile, output of the one before it; softmax while the latter is under way."""
        k, v = state.k, state.v
        shared.k.wait_full(k)
        self.await_turn(lanes)
        s = self.tile.scores(math.q, shared.k.address(k))
        shared.v.wait_full(v)
        out = self.tile.accumulate(state.out, state.p, shared.v.address(v))
        self.end_turn(lanes)
        s = sm90.wgmma_wait(1, s)
        shared.k.release(k, lanes.lane)
        if masked:
            s = math.mask.apply(s, kv_tile * self.spec.tile.cols)
        risen = softmax.rise(state.shift, s, always=self.spec.tile.rescale == "always")
        s = softmax.exponentials(s, risen.shift, may_be_empty=masked)
        total = [t * factor for t, factor in zip(state.total, risen.factors, strict=True)]
        total = softmax.sums(s, total)
        if self.spec.tile.pinned:
            sm90.settle(total)  # no exponential is put off till after the wait
        out = sm90.wgmma_wait(0, out, state.p)
        shared.v.release(v, lanes.lane)
        p = self.tile.probabilities(s)
        out = self.rescale(out, risen)
        return State(out, p, risen.shift, total, shared.k.next(k), shared.v.next(v))

    @cute.jit
    def rescale(self, out: list[Float32], risen: Risen) -> list[Float32]:
        if risen.some:
            out = [x * risen.factors[i % 4 // 2] for i, x in enumerate(out)]
        return out

    def await_turn(self, lanes: GroupLanes) -> None:
        if self.spec.tile.ping_pong:
            sm90.named_sync(lanes.group + 1, 256)

    def end_turn(self, lanes: GroupLanes) -> None:
        if self.spec.tile.ping_pong:
            last = lanes.group == Int32(self.spec.tile.math_groups - 1)
            sm90.named_arrive(ptx.select(last, Int32(1), lanes.group + 2), 256)
