"""Hopper kernels with transform warps, which produce wgmma operands from tiles as TMA loads them.

producer          K0 Q V0 K1 V1 ...              (rings of staged tiles, or those of the operands)
transform warps      K0' K1' V0' K2' V1' ...     (rings of operands)
MMA warpgroups           S0 | S1 + O(P0 V0') ...
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.pipeline import PipelineState, start
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.kernel import Fa3Params, Fa3Program, Maps
from cute_attn.kernels.fa3.parts.rings import SmemRings


class TransformWarpsProgram(Fa3Program):
    """Hopper kernel with transform warps between the producer and the MMA warpgroups."""

    def transform(self, warp: Int32, lane: Int32) -> Any:
        """Returns the transform of one warp."""
        raise NotImplementedError

    def transform_tiles(self, rings: SmemRings, transform: Any, at: Any, total: Int32, valid: Int32) -> Any:
        """Produces the operands of `total` kv tiles, the first of which has `valid` keys; returns the next pipeline
        state.
        """
        raise NotImplementedError

    def initial_state(self) -> Any:
        return start()

    @property
    def transform_warps(self) -> int:
        """Number of transform warps: the rest of the producer's warpgroup, then the last warpgroup."""
        return self.spec.tile.transform_warps

    def initialise(self, rings: SmemRings) -> None:
        warps = self.mma_threads // 32
        rings.q.initialise(warps + self.transform_warps)
        rings.k.initialise(warps)
        rings.v.initialise(warps)
        for staged, ring in ((rings.staged_k, rings.k), (rings.staged_v, rings.v)):
            if staged is not ring:
                staged.initialise(self.transform_warps)

    @cute.jit
    def producer_warpgroup(self, params: Fa3Params, maps: Maps, rings: SmemRings, thread: Int32) -> None:
        if thread < 32:
            self.producer_loop(params, maps, rings)
        else:
            self.transform_loop(params, rings, thread - 32)

    @cute.jit
    def consumer_warpgroups(self, params: Fa3Params, rings: SmemRings, thread: Int32) -> None:
        if cutlass.const_expr(self.transform_warps == 3):
            self.consumer_warpgroup(params, rings)
        else:
            if thread < 128 + self.mma_threads:
                self.consumer_warpgroup(params, rings)
            else:
                sm90.release_registers(self.spec.registers[0])
                self.transform_loop(params, rings, thread - (32 + self.mma_threads))

    @cute.jit
    def transform_loop(self, p: Fa3Params, rings: SmemRings, thread: Int32) -> None:
        """Transforms the kv tiles of all query tiles, in the order of loading. `thread`: index among the transform
        warps.
        """
        lane = thread & 31
        transform = self.transform(cute.arch.make_warp_uniform(thread >> 5), lane)
        q, at = start(), self.initial_state()
        head_block = self.next_tile(rings, q)
        while head_block >= 0:
            query = QueryTile.load(rings.record(q))
            order = self.order(p, query)
            rings.q.release(q, lane)
            valid = query.kv_end - (order.end - 1) * self.spec.tile.cols  # keys of the first tile in the order
            at = self.transform_tiles(rings, transform, at, order.total, valid)
            q = rings.q.next(q)
            head_block = self.next_tile(rings, q)

    @cute.jit
    def publish_operand(self, barriers: cutlass.Constexpr, lane: Int32) -> None:
        """Fences this warp's part of an operand and arrives at `barriers`: the operand is full, its source empty."""
        sm90.fence_async()
        ptx.sync_warp()
        if lane == 0:
            for i in cutlass.range_constexpr(len(barriers)):
                sm90.barrier_arrive(barriers[i])

    @cute.jit
    def clear_tail(self, rings: SmemRings, mma: cutlass.Constexpr, first: PipelineState) -> None:
        """Nothing to do: the transform warps have cleared it."""
