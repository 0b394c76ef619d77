"""Merge where every warp has a softmax state of its own, in the layout of mma.sync."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.softmax import Running
from cute_attn.kernels.xqa.parts.merge import VECTORS_PER_LANE, Merge
from cute_attn.kernels.xqa.parts.partition import KvSplit, Segment, Share
from cute_attn.kernels.xqa.parts.softmax import reduce_column
from cute_attn.kernels.xqa.parts.tile_forms import Format
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec


@dataclass(frozen=True)
class WarpMerge(Merge):
    """Merge of states in registers, which warps publish first."""

    spec: XqaSpec
    memory: XqaMemory
    format: Format

    @staticmethod
    def open(memory: XqaMemory) -> None:
        """Prepare shared memory, before anything else."""

    @property
    def states(self) -> range:
        return range(0, self.spec.warps, self.spec.team)

    def has_columns(self, dim: Int32) -> Boolean | bool:
        return dim < self.spec.warp_dim if self.spec.warp_dim < self.spec.tile_dim else True

    def head_dim(self, dim: Int32) -> Int32:
        return self.team.shifted(dim, self.spec.warp_dim)

    @cute.jit
    def publish(self, running: Running, warp: Int32) -> None:
        """Store a warp's outputs as fp32 [row, dim] in the free slots of its ring, dims swizzled by `swizzled_dim`."""
        lane = cute.arch.thread_idx()[0] & 31
        totals = [reduce_column(lambda a, b: a + b, x) for x in running.total]
        outputs = self.base + warp * self.memory.ring_bytes + self.memory.outputs
        stats = self.base + self.memory.stats + warp * (self.memory.rows * 8)
        self.publish_stats(stats, [Float32(0.0) - x for x in running.shift], totals)
        if cutlass.const_expr(self.spec.paired):
            if lane >> 4 == (lane >> 1 & 1):  # columns that carry the scales of the block of this lane's rows
                self.publish_outputs(running, outputs, lane)
        else:
            self.publish_outputs(running, outputs, lane)

    def publish_outputs(self, running: Running, outputs: Int32, lane: Int32) -> None:
        g, t = lane >> 2, lane & 3
        for i in range(0, len(running.out), 4):
            tile, block = i // 4 // self.spec.row_blocks, i // 4 % self.spec.row_blocks
            dim, distance = self.format.output_dim(tile, g)
            for column in (0, 1):
                row = self.spec.row(t * 2 + column) + 8 * block
                at = outputs + row * (self.spec.tile_dim * 4) + self.swizzled_dim(dim, row) * 4
                upper, lower = running.out[i + column], running.out[i + column + 2]
                if distance == 1:
                    ptx.st_shared_v2_f32(at, 0, [upper, lower])
                else:  # row g + 8 differs in bit 3, which the swizzle may flip
                    far = outputs + row * (self.spec.tile_dim * 4) + self.swizzled_dim(dim + distance, row) * 4
                    ptx.st_shared_f32(at, 0, upper)
                    ptx.st_shared_f32(far, 0, lower)

    @cute.jit
    def publish_stats(self, stats: Int32, maximum: list[Float32], totals: list[Float32]) -> None:
        lane = cute.arch.thread_idx()[0] & 31
        if lane < 4:
            for slot in cutlass.range_constexpr(2 * self.spec.row_blocks):
                row = lane * 2 + (slot // 2 * 8 + slot % 2)
                ptx.st_shared_v2_f32(stats + row * 8, 0, [maximum[slot], totals[slot]])

    @property
    def vectors_per_lane(self) -> int:
        crowded = self.spec.warps * (self.spec.ctas + self.spec.guests) > 8  # leaves fewer registers per thread
        shared = self.team.size > 1 or self.spec.heads > 1
        vectors = VECTORS_PER_LANE if crowded or shared else 2 * VECTORS_PER_LANE
        return min(vectors, self.spec.rows * self.vectors_per_row // self.lanes)


@dataclass(frozen=True)
class WholeMerge(WarpMerge):
    """Merge of segments that one CTA processes alone (`partition.WholeSegments`)."""

    @cute.jit
    def write(self, rows: PackedRows, segment: Segment, share: Share, split: KvSplit) -> None:
        """Write outputs, by all threads. A barrier after `publish` must come before."""
        self.store_rows(rows)
