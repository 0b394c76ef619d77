"""Warp of the products: S = Q K^T and O += P V of all query tiles, in the order that keeps the tensor cores busy.

Two query tiles:  S0 S1 | O0 += P0 V, S0' | O1 += P1 V, S1' | ...    softmax of one overlaps products of the other

S overwrites P of the kv tile before in tensor memory. That needs no wait: products of one thread execute in order.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings, start
from cute_attn.kernels.blocks.roles import WarpRole
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.parts.umma import TmemMap, UmmaTile
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.fa4.work import KvSteps

QUERY_TILES = (0, 1)


class MmaState(NamedTuple):
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
    """Role of the warp of the products, for two query tiles."""

    def __init__(self, program: PersistentProgram, spec: Fa4Spec, tile: UmmaTile) -> None:
        self.program, self.spec, self.tile = program, spec, tile
        handed_over = {f"{ring}{i}": 1 for i in QUERY_TILES for ring in "so"}
        told = {"tail": spec.clears_tail, "normalized": spec.normalizes_q}
        reads = ("q", "k", "v", *(ring for ring, used in told.items() if used))
        self.role = WarpRole("MMA", 1, handed_over, reads, reads_records=True)

    @cute.jit
    def run(self, p: PersistentParams, rings: SmemRings, tmem: TmemMap) -> None:
        """Starts the products of all work items of the CTA."""
        elected = sm100.elect_one()
        lane = cute.arch.thread_idx()[0] & 31
        q, tail, state = start(), start(), MmaState(*(start() for _ in MmaState._fields))
        head_block = rings.next_head_block(q)
        while head_block >= 0:
            work = QueryTile.load(rings.record(q))
            order = self.program.order(p, work)
            steps = KvSteps.of(p, work, order, self.spec.tile.query_tiles, self.spec.tile.cols)
            context = MmaContext(rings, tmem, rings.q.address(q), steps, elected)
            if cutlass.const_expr(self.spec.clears_tail):  # noqa: SIM102  (one when tracing, one at run time)
                if cutlass.and_(order.total > 0, order.end * self.spec.tile.cols > work.kv_end):
                    rings.by_name["tail"].wait_full(tail)
                    rings.by_name["tail"].release(tail, lane)
                    tail = rings.by_name["tail"].next(tail)
            if cutlass.const_expr(self.spec.normalizes_q):
                rings.by_name["normalized"].wait_full(q)
                rings.by_name["normalized"].release(q, lane)
            state = self.mainloop(context, state)
            sm100.commit(rings.q.empty(q), elected)
            state = self.last_outputs(context, state)
            q = rings.q.next(q)
            head_block = rings.next_head_block(q)

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

    def step(self, context: MmaContext, state: MmaState) -> MmaState:
        """Starts O += P V of the kv tile before and S of this one, for both query tiles."""
        rings = context.rings
        rings.v.wait_full(state.v)
        state = self.output(context, state, 0, True)
        rings.k.wait_full(state.k)
        self.scores(context, state, 0)
        state = self.output(context, state, 1, True)
        sm100.commit(rings.v.empty(state.v), context.elected)
        self.scores(context, state, 1)
        sm100.commit(rings.k.empty(state.k), context.elected)
        return state._replace(k=rings.k.next(state.k), v=rings.v.next(state.v))

    @cute.jit
    def ramp_step(self, context: cutlass.Constexpr, state: cutlass.Constexpr, step: Int32) -> Any:
        """Does the same where a query tile may not take part yet, or have no output yet."""
        rings, first = context.rings, context.steps.first
        if step > 0:
            rings.v.wait_full(state.v)
        rings.k.wait_full(state.k)
        for i in cutlass.range_constexpr(len(QUERY_TILES)):
            if step > first[i]:
                state = self.first_output(context, state, i, step > first[i] + 1)
            if step >= first[i]:
                self.scores(context, state, i)
        if step > 0:
            state = self.release_v(context, state)
        sm100.commit(rings.k.empty(state.k), context.elected)
        return state._replace(k=rings.k.next(state.k))

    @cute.jit
    def last_outputs(self, context: cutlass.Constexpr, state: cutlass.Constexpr) -> Any:
        """Starts O += P V of the last kv tile."""
        steps = context.steps
        if steps.order.total > 0:
            context.rings.v.wait_full(state.v)
            for i in cutlass.range_constexpr(len(QUERY_TILES)):
                if steps.first[i] < steps.order.total:
                    state = self.first_output(context, state, i, steps.order.total > steps.first[i] + 1)
                    state = self.publish_output(context, state, i)
            state = self.release_v(context, state)
        return state

    def scores(self, context: MmaContext, state: MmaState, i: int) -> None:
        """Starts S of query tile i. Its slot is free: P in it has been read by a product that was started before."""
        k = context.rings.k.address(state.k)
        self.tile.scores(context.tmem.scores(Int32(i)), context.q, k, i, context.elected)
        sm100.commit(context.ring("s", i).full(state.s(i)), context.elected)

    def first_output(self, context: MmaContext, state: MmaState, i: int, accumulate: Boolean) -> MmaState:
        """Starts O (+)= P V once O is free, which matters for the first of a work item."""
        context.ring("o", i).wait_empty(state.o(i))
        return self.output(context, state, i, accumulate)

    def output(self, context: MmaContext, state: MmaState, i: int, accumulate: Boolean | bool) -> MmaState:
        """Starts O (+)= P V of query tile i, once softmax has released P."""
        ring, v = context.ring("s", i), context.rings.v.address(state.v)
        ring.wait_released(state.s(i))
        sm100.fence_after_sync()
        p = context.tmem.scores(Int32(i))
        self.tile.accumulate(context.tmem.output(i), p, v, accumulate, context.elected)
        return state._replace(**{f"s{i}": ring.next(state.s(i))})

    def publish_output(self, context: MmaContext, state: MmaState, i: int) -> MmaState:
        ring = context.ring("o", i)
        sm100.commit(ring.full(state.o(i)), context.elected)
        return state._replace(**{f"o{i}": ring.next(state.o(i))})

    def release_v(self, context: MmaContext, state: MmaState) -> MmaState:
        sm100.commit(context.rings.v.empty(state.v), context.elected)
        return state._replace(v=context.rings.v.next(state.v))
