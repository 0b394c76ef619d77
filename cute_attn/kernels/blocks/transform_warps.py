"""Transform warps, which produce operands of the tensor cores from tiles as TMA loads them.

producer          K0 Q V0 K1 V1 ...              (rings of staged tiles, or those of the operands)
transform warps      K0' K1' V0' K2' V1' ...     (rings of operands)
MMA warps                S0 | S1 + O(P0 V0') ...
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.masks import TileOrder
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import AnyParams
from cute_attn.kernels.blocks.pipeline import PipelineState, SmemRings, WarpRole, start
from cute_attn.kernels.blocks.tile_scheduler import QueryTile


class OperandState(NamedTuple):
    """Pipeline states of a K or V tile: in the ring of staged tiles, and in that of the operands made from them."""

    staged: PipelineState
    operand: PipelineState


class WarpLane(NamedTuple):
    """Position of a thread among the transform warps."""

    warp: Int32
    lane: Int32


class TransformWarps:
    """Role of the transform warps. `spec`: its tile has their number."""

    def __init__(self, program: PersistentProgram, spec: Any, memory: Any) -> None:
        self.program, self.spec, self.memory = program, spec, memory
        self.warps = spec.tile.transform_warps
        staged = {operand: memory.loaded_ring(operand) for operand in ("k", "v")}
        made = {operand: ring for operand, ring in staged.items() if ring != operand}
        fills = dict.fromkeys(made, self.warps)
        self.role = WarpRole("transform", self.warps, fills, tuple(made.values()), reads_records=True)

    def convert(self, place: WarpLane, operand: str, source: Int32, target: Int32) -> None:
        """Makes this warp's part of operand "k" or "v" of a staged tile."""
        raise NotImplementedError

    def clear(self, place: WarpLane, operand: str, source: Int32, first: Int32) -> None:
        """Zeroes keys of a staged tile from `first`, of another request or of none, because 0 * NaN is not 0."""
        raise NotImplementedError

    def transform_query(self, rings: SmemRings, place: WarpLane, at: Any, order: TileOrder, valid: Int32) -> Any:
        """Produces the operands of a query tile's kv tiles, the first of which has `valid` keys; returns the next
        pipeline state.
        """
        raise NotImplementedError

    @property
    def clears_tail(self) -> bool:
        """Whether rows past the end hold another request's values, or anything."""
        return self.spec.schedule == "items" and self.spec.kv != "gathered"

    def initial_state(self) -> Any:
        return start()

    @cute.jit
    def run(self, p: AnyParams, rings: SmemRings, thread: Int32) -> None:
        """Transforms the kv tiles of all query tiles, in the order of loading. `thread`: index among the transform
        warps.
        """
        lane = thread & 31
        place = WarpLane(cute.arch.make_warp_uniform(thread >> 5), lane)
        q, at = start(), self.initial_state()
        head_block = rings.next_head_block(q)
        while head_block >= 0:
            query = QueryTile.load(rings.record(q))
            order = self.program.order(p, query)
            rings.q.release(q, place.lane)
            valid = query.kv_end - (order.end - 1) * self.spec.tile.cols  # keys of the first tile in the order
            at = self.transform_query(rings, place, at, order, valid)
            q = rings.q.next(q)
            head_block = rings.next_head_block(q)

    @cute.jit
    def make_operand(
        self,
        rings: SmemRings,
        place: WarpLane,
        operand: cutlass.Constexpr,
        at: OperandState,
        tail: cutlass.Constexpr = None,
    ) -> Any:
        """Makes the operand of a staged tile of "k" or "v". `tail`: where keys may have to be cleared, returns whether
        they have, and the first.
        """
        staged, ring = rings.by_name[f"staged_{operand}"], rings.by_name[operand]
        staged.wait_full(at.staged)
        if cutlass.const_expr(self.clears_tail and tail is not None):
            due, first = tail()
            if due:
                self.clear(place, operand, staged.address(at.staged), first)
        ring.wait_empty(at.operand)
        self.convert(place, operand, staged.address(at.staged), ring.address(at.operand))
        return self.publish(rings, operand, at, place.lane)

    @cute.jit
    def publish(self, rings: SmemRings, operand: cutlass.Constexpr, at: OperandState, lane: Int32) -> Any:
        """Fences this warp's part of an operand and arrives: the operand is full, its source empty. Returns the next
        states.
        """
        staged, ring = rings.by_name[f"staged_{operand}"], rings.by_name[operand]
        released, filled = staged.empty(at.staged), ring.full(at.operand)
        tma.fence_async()
        ptx.sync_warp()
        if lane == 0:
            tma.barrier_arrive(released)
            tma.barrier_arrive(filled)
        return OperandState(staged.next(at.staged), ring.next(at.operand))
