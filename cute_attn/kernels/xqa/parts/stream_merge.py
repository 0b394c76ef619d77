"""Merge where the slots of a ring that are free differ from warp to warp."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.merge import SoftmaxState, merge_states
from cute_attn.kernels.xqa.parts.warp_merge import WarpMerge


@dataclass(frozen=True)
class StreamMerge(WarpMerge):
    """Merge of states whose addresses the warps publish, too."""

    @cute.jit
    def place(self, warp: Int32, outputs: Int32) -> None:
        """Say where a warp will store its outputs."""
        if cute.arch.thread_idx()[0] & 31 == 0:
            ptx.st_shared_b32(self.base + self.memory.places + warp * 4, 0, outputs)
        ptx.sync_warp()

    def outputs_of(self, state: Int32) -> Int32:
        return isa.ld_shared_b32(self.base + self.memory.places + state * 4)

    def merge_warps(self, row: Int32, dim: Int32) -> SoftmaxState:
        parts, stats_bytes = [], self.memory.rows * 8
        within = row * (self.spec.tile_dim * 4) + self.swizzled_dim(dim, row) * 4
        for warp in range(self.spec.warps):
            stats = self.base + self.memory.stats + row * 8
            maximum, total = ptx.ld_shared_v2_f32(stats, warp * stats_bytes)
            values = ptx.ld_shared_v4_f32(isa.ld_shared_b32(self.base, self.memory.places + warp * 4) + within, 0)
            parts.append(SoftmaxState(maximum, total, values))
        return merge_states(parts)
