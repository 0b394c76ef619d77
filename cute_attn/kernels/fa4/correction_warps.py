"""Correction and epilogue warpgroup: rescales O in tensor memory where row maxima grow, beside what the epilogue does.

The factors of a step arrive after its S is complete, and then so is the product before, whose thread started it earlier
(see `CoveredProducts`). P of the step counts as ready once these warps have released it too.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.pipeline import PipelineState, start
from cute_attn.kernels.fa4.epilogue_warps import EpilogueWarps
from cute_attn.kernels.fa4.parts.lanes import RowLanes
from cute_attn.kernels.fa4.parts.rescale import rescale
from cute_attn.kernels.fa4.parts.umma import UmmaTile
from cute_attn.kernels.fa4.spec import Fa4Spec


class CorrectionWarps(EpilogueWarps):
    """Role of the epilogue warps that also correct O."""

    def __init__(self, program: PersistentProgram, spec: Fa4Spec, tile: UmmaTile) -> None:
        super().__init__(program, spec, tile)
        scores = tuple(f"s{i}" for i in self.query_tiles)
        self.role = replace(self.role, name="correction", reads=(*self.role.reads, *scores))

    @cute.jit
    def follow(self, rings: cutlass.Constexpr, tmem: cutlass.Constexpr, steps: cutlass.Constexpr, stats: Any) -> Any:
        """Corrects O in all steps of a work item: only the first ones may be without a query tile or its output."""
        total = steps.order.total
        ramp = ptx.minimum(ptx.maximum(steps.first[0], steps.first[1]) + 1, total)
        for step in cutlass.range(0, ramp, unroll=1):
            for i in cutlass.range_constexpr(len(self.query_tiles)):
                if step >= steps.first[i]:
                    stats[i] = self.correct(rings, tmem, i, stats[i], step > steps.first[i])
        for _step in cutlass.range(ramp, total, unroll=1):
            for i in cutlass.range_constexpr(len(self.query_tiles)):
                stats[i] = self.correct(rings, tmem, i, stats[i], Boolean(True))
        return stats

    @cute.jit
    def correct(
        self,
        rings: cutlass.Constexpr,
        tmem: cutlass.Constexpr,
        i: cutlass.Constexpr,
        stats: PipelineState,
        has_output: Boolean,
    ) -> Any:
        """Rescales O of query tile i, and releases P."""
        lanes, ring, scores = (
            RowLanes.of(Int32(i), self.spec.tile.ctas),
            rings.by_name[f"stats{i}"],
            rings.by_name[f"s{i}"],
        )
        ring.wait_full(stats)
        factor = ptx.ld_shared_f32(ring.address(stats) + lanes.lane_row * 8)
        ptx.sync_warp()
        ring.release(stats, lanes.lane)
        moved = Boolean(factor == Float32(1.0)) == Boolean(False)  # NaN too
        if cute.arch.vote_any_sync(cutlass.and_(has_output, moved)):
            sm100.fence_after_sync()
            rescale(tmem.output(i) + lanes.tmem, Int32(self.tile.output_columns), factor)
            sm100.fence_before_sync()
        ptx.sync_warp()
        scores.release(start(), lanes.lane)  # of one slot: the same barrier in all phases
        return ring.next(stats)
