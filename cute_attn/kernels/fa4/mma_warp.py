"""Warp of the products: S = Q K^T and O += P V of all query tiles, in the order that keeps the tensor cores busy.

Two query tiles:  S0 S1 | O0 += P0 V, S0' | O1 += P1 V, S1' | ...    softmax of one overlaps products of the other
One query tile:   S S' | O += P V, S'' | O += P' V', S''' | ...       softmax of a kv tile overlaps S of the next

S overwrites an earlier P in tensor memory. That needs no wait: products of one thread execute in order.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings, WarpRole, start
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.parts.umma import TmemMap, UmmaTile
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.fa4.tail_warp import ends_inside
from cute_attn.kernels.fa4.work import KvSteps


@dataclass(frozen=True)
class MmaContext:
    """What the products of a work item need besides their state."""

    rings: SmemRings
    tmem: TmemMap
    q: Int32  # slot
    steps: KvSteps
    elected: Int32

    def ring(self, name: str, query_tile: int) -> Ring:
        return self.rings.by_name[f"{name}{query_tile}"]


class MmaWarp:
    """Role of the warp of the products. Subclasses add their order, and the pipeline states that it needs."""

    state_type: Any

    def __init__(self, program: PersistentProgram, spec: Fa4Spec, tile: UmmaTile) -> None:
        self.program, self.spec, self.tile = program, spec, tile
        self.query_tiles = range(spec.tile.query_tiles)
        handed_over = {f"{ring}{i}": 1 for i in self.query_tiles for ring in "so"}
        told = {"tail": spec.clears_tail, "normalized": spec.normalizes_q}
        reads = ("q", "k", "v", *(ring for ring, used in told.items() if used))
        self.role = WarpRole("MMA", 1, handed_over, reads, reads_records=True)

    @cute.jit
    def run(self, p: PersistentParams, rings: SmemRings, tmem: TmemMap) -> None:
        """Starts the products of all work items of the CTA, or of the pair that it leads."""
        elected = sm100.elect_one()
        lane = cute.arch.thread_idx()[0] & 31
        q, tail, state = start(), start(), self.state_type(*(start() for _ in self.state_type._fields))
        head_block = rings.next_head_block(q)
        while head_block >= 0:
            work = QueryTile.load(rings.record(q))
            order = self.program.order(p, work)
            steps = KvSteps.of(p, work, order, self.spec.tile)
            context = MmaContext(rings, tmem, rings.q.address(q), steps, elected)
            if cutlass.const_expr(self.spec.clears_tail):  # noqa: SIM102  (one when tracing, one at run time)
                if ends_inside(order, work, self.spec.tile.cols):
                    rings.by_name["tail"].wait_full(tail)
                    rings.by_name["tail"].release(tail, lane)
                    tail = rings.by_name["tail"].next(tail)
            if cutlass.const_expr(self.spec.normalizes_q):
                rings.by_name["normalized"].wait_full(q)
                rings.by_name["normalized"].release(q, lane)
            state = self.mainloop(context, state)
            self.commit(context, rings.q.empty(q))
            state = self.last_outputs(context, state)
            q = rings.q.next(q)
            head_block = rings.next_head_block(q)

    def mainloop(self, context: Any, state: Any) -> Any:
        """Starts all products that Q's slot is needed for, and those between them."""
        raise NotImplementedError

    def last_outputs(self, context: Any, state: Any) -> Any:
        """Starts the products that are left."""
        raise NotImplementedError

    # --- products ---------------------------------------------------------------------------------------------------

    def scores(self, context: MmaContext, k: PipelineState, s: PipelineState, i: int) -> None:
        """Starts S of query tile i. Its slot is free: P in it has been read by a product that was started before."""
        ring, k_slot = context.ring("s", i), context.rings.k.address(k)
        self.tile.scores(context.tmem.scores(ring.slot(s) + i), context.q, k_slot, i, context.elected)
        self.commit(context, ring.full(s))

    def output(
        self, context: MmaContext, v: PipelineState, s: PipelineState, i: int, accumulate: Boolean | bool
    ) -> PipelineState:
        """Starts O (+)= P V of query tile i, once softmax has released P; returns the next state of S."""
        ring, v_slot = context.ring("s", i), context.rings.v.address(v)
        ring.wait_released(s)
        sm100.fence_after_sync()
        p = context.tmem.scores(ring.slot(s) + i)
        self.tile.accumulate(context.tmem.output(i), p, v_slot, accumulate, context.elected)
        return ring.next(s)

    def publish_output(self, context: MmaContext, o: PipelineState, i: int) -> PipelineState:
        ring = context.ring("o", i)
        self.commit(context, ring.full(o))
        return ring.next(o)

    def release(self, context: MmaContext, ring: Ring, state: PipelineState) -> PipelineState:
        self.commit(context, ring.empty(state))
        return ring.next(state)

    def commit(self, context: MmaContext, barrier: Int32) -> None:
        sm100.commit(barrier, context.elected, self.spec.tile.ctas)


class TwoTileState(NamedTuple):
    """Pipeline states of the operands and of S and O of both query tiles. That of V is one kv tile behind K's."""

    k: PipelineState
    v: PipelineState
    s0: PipelineState
    s1: PipelineState
    o0: PipelineState
    o1: PipelineState

    def s(self, query_tile: int) -> PipelineState:
        return (self.s0, self.s1)[query_tile]

    def o(self, query_tile: int) -> PipelineState:
        return (self.o0, self.o1)[query_tile]


class TwoTileMmaWarp(MmaWarp):
    """Order of the products of two query tiles."""

    state_type = TwoTileState

    @cute.jit
    def mainloop(self, context: cutlass.Constexpr, state: cutlass.Constexpr) -> Any:
        """Starts all products but the last of each output."""
        steps = context.steps
        ramp = ptx.minimum(ptx.maximum(steps.first[0], steps.first[1]) + 2, steps.order.total)
        for step in cutlass.range(0, ramp, unroll=1):
            state = self.ramp_step(context, state, step)
        for _step in cutlass.range(ramp, steps.order.total, unroll=1):
            state = self.step(context, state)
        return state

    def step(self, context: MmaContext, state: TwoTileState) -> TwoTileState:
        """Starts O += P V of the kv tile before and S of this one, for both query tiles."""
        rings = context.rings
        rings.v.wait_full(state.v)
        state = self.next_output(context, state, 0, True)
        rings.k.wait_full(state.k)
        self.scores(context, state.k, state.s0, 0)
        state = self.next_output(context, state, 1, True)
        v = self.release(context, context.rings.v, state.v)
        self.scores(context, state.k, state.s1, 1)
        return state._replace(k=self.release(context, context.rings.k, state.k), v=v)

    @cute.jit
    def ramp_step(self, context: cutlass.Constexpr, state: cutlass.Constexpr, step: Int32) -> Any:
        """Does the same where a query tile may not take part yet, or have no output yet."""
        rings, first = context.rings, context.steps.first
        if step > 0:
            rings.v.wait_full(state.v)
        rings.k.wait_full(state.k)
        for i in cutlass.range_constexpr(len(self.query_tiles)):
            if step > first[i]:
                state = self.first_output(context, state, i, step > first[i] + 1)
            if step >= first[i]:
                self.scores(context, state.k, state.s(i), i)
        if step > 0:
            state = state._replace(v=self.release(context, context.rings.v, state.v))
        return state._replace(k=self.release(context, context.rings.k, state.k))

    @cute.jit
    def last_outputs(self, context: cutlass.Constexpr, state: cutlass.Constexpr) -> Any:
        """Starts O += P V of the last kv tile."""
        steps = context.steps
        if steps.order.total > 0:
            context.rings.v.wait_full(state.v)
            for i in cutlass.range_constexpr(len(self.query_tiles)):
                if steps.first[i] < steps.order.total:
                    state = self.first_output(context, state, i, steps.order.total > steps.first[i] + 1)
                    state = state._replace(**{f"o{i}": self.publish_output(context, state.o(i), i)})
            state = state._replace(v=self.release(context, context.rings.v, state.v))
        return state

    def first_output(self, context: MmaContext, state: TwoTileState, i: int, accumulate: Boolean) -> TwoTileState:
        """Starts O (+)= P V once O is free, which matters for the first of a work item."""
        context.ring("o", i).wait_empty(state.o(i))
        return self.next_output(context, state, i, accumulate)

    def next_output(self, context: MmaContext, state: TwoTileState, i: int, accumulate: Boolean | bool) -> TwoTileState:
        return state._replace(**{f"s{i}": self.output(context, state.v, state.s(i), i, accumulate)})


class OneTileState(NamedTuple):
    """Pipeline states of K, of P, and of O. V has as many stages as P and is read with it: its state is that of P."""

    k: PipelineState
    p: PipelineState
    o: PipelineState


class OneTileMmaWarp(MmaWarp):
    """Order of the products of one query tile. S is as many kv tiles ahead of P as there are stages: it is started
    where P has just been read.
    """

    state_type = OneTileState

    @cute.jit
    def mainloop(self, context: cutlass.Constexpr, state: cutlass.Constexpr) -> Any:
        """Starts all S, and O += P V of all but the last kv tiles."""
        total, s = context.steps.order.total, state.p
        ahead = ptx.minimum(total, Int32(context.ring("s", 0).stages))
        for _step in cutlass.range(0, ahead, unroll=1):
            state = self.next_scores(context, state, s)
            s = context.ring("s", 0).next(s)
        if total > 0:
            context.ring("o", 0).wait_empty(state.o)
        for step in cutlass.range(ahead, total, unroll=1):
            p = state.p
            state = self.next_output(context, state, step > ahead)
            state = self.next_scores(context, state, p)
        return state

    @cute.jit
    def last_outputs(self, context: cutlass.Constexpr, state: cutlass.Constexpr) -> Any:
        """Starts O += P V of the last kv tiles."""
        total = context.steps.order.total
        first = ptx.maximum(total - context.ring("s", 0).stages, Int32(0))
        for step in cutlass.range(first, total, unroll=1):
            state = self.next_output(context, state, step > 0)
        if total > 0:
            state = state._replace(o=self.publish_output(context, state.o, 0))
        return state

    def next_scores(self, context: MmaContext, state: OneTileState, s: PipelineState) -> OneTileState:
        context.rings.k.wait_full(state.k)
        self.scores(context, state.k, s, 0)
        return state._replace(k=self.release(context, context.rings.k, state.k))

    def next_output(self, context: MmaContext, state: OneTileState, accumulate: Boolean) -> OneTileState:
        context.rings.v.wait_full(state.p)
        p = self.output(context, state.p, state.p, 0, accumulate)
        self.release(context, context.rings.v, state.p)
        return state._replace(p=p)
