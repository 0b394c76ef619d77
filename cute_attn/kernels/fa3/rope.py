"""The Hopper kernel that rotates q and k (RoPE): transform warps rotate every K tile on its way from the staging ring
to the operands, MMA warps the rows of q that they multiply, once per query tile.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.persistent_params import AnyParams, Maps, extended
from cute_attn.kernels.blocks.pipeline import SmemRings, start
from cute_attn.kernels.blocks.rope import RotaryTable
from cute_attn.kernels.blocks.smem import swizzled
from cute_attn.kernels.blocks.transform_warps import OperandState, TransformWarps, WarpLane
from cute_attn.kernels.fa3.kernel import Fa3Program
from cute_attn.kernels.fa3.parts.wgmma import WARPGROUP_ROWS, WarpgroupLanes
from cute_attn.kernels.fa3.smem import RopeMemory
from cute_attn.kernels.formats import LINE

RopeParams = extended("RopeParams", {"rope_base": Float64, "rope_ratio": Float64})


@dataclass(frozen=True)
class Rotation(RotaryTable):
    """Rotation of rows in columns of 128-byte lines, as TMA writes them."""

    @property
    def pairs(self) -> int:
        """Pairs of 16-byte chunks of a row."""
        return self.head_dim // 16

    @property
    def lanes(self) -> int:
        """Adjacent lanes per row: a power of two."""
        return min(1 << (self.pairs - 1).bit_length(), 8)

    def offset(self, row: Int32, chunk: Int32, tile_rows: int) -> Int32:
        return (chunk >> 3) * (tile_rows * LINE) + swizzled(row, chunk & 7, LINE)

    @cute.jit
    def rotate(
        self,
        lane: Int32,
        row: Int32,
        source: Int32,
        target: Int32,
        tile_rows: cutlass.Constexpr,
        position: Int32,
    ) -> None:
        """Rotates the chunks of `row` that this lane has, from the tile at `source` to that at `target`."""
        for first in cutlass.range_constexpr(0, self.pairs, self.lanes):
            chunk = first + lane % self.lanes
            exists = True if first + self.lanes <= self.pairs else chunk < self.pairs
            if exists:
                places = [self.offset(row, at, tile_rows) for at in (chunk, chunk + self.pairs)]
                sources, targets = (source + place for place in places), (target + place for place in places)
                self.rotate_chunk(sources, targets, chunk, position)


class RotationWarps(TransformWarps):
    """Transform warps that rotate K."""

    program: "RopeProgram"
    memory: RopeMemory

    def initial_state(self) -> OperandState:
        return OperandState(start(), start())

    @cute.jit
    def transform_query(
        self, rings: SmemRings, place: WarpLane, at: Any, order: cutlass.Constexpr, valid: Int32
    ) -> Any:
        for step in cutlass.range(0, order.total, unroll=1):
            rings.staged_k.wait_full(at.staged)
            rings.k.wait_empty(at.operand)
            first = order.at(step) * self.spec.tile.cols
            self.rotate(place, rings.staged_k.address(at.staged), rings.k.address(at.operand), first)
            at = self.publish(rings, "k", at, place.lane)
        return at

    @cute.jit
    def rotate(self, place: WarpLane, source: Int32, target: Int32, first: Int32) -> None:
        """Rotates a tile whose row 0 is token `first`."""
        rotation, cols = self.program.rotation, self.spec.tile.cols
        rows = 32 // rotation.lanes  # of a warp
        for i in cutlass.range(place.warp, cols // rows, self.warps, unroll=1):
            row = i * rows + place.lane // rotation.lanes
            rotation.rotate(place.lane, row, source, target, cols, first + row)


class RopeProgram(Fa3Program):
    """Hopper kernel that rotates q and k."""

    params = RopeParams
    memory: RopeMemory
    transform_type = RotationWarps
    rotation: Rotation

    def run_warps(self, params: Any, maps: Maps, rings: SmemRings, thread: Int32) -> None:
        spec, table = self.spec, rings.scratch["frequencies"]
        self.rotation = Rotation(
            spec.dtype, spec.head_dim_qk, table, params.rope_base, params.rope_ratio, spec.tile.threads
        )
        self.rotation.prepare()
        ptx.sync_threads()
        super().run_warps(params, maps, rings, thread)

    @cute.jit
    def prepare_q(
        self, p: AnyParams, work: cutlass.Constexpr, lanes: WarpgroupLanes, q_rows: Int32, scale: Float32
    ) -> list[Float32]:
        """Rotates this warp's 16 rows of q in place. wgmma reads them for that warp alone: a warp barrier suffices."""
        rotation, rows, shift = self.rotation, work.rows(p), work.kv_len - work.qo_len
        per_pass = 32 // rotation.lanes
        for i in cutlass.range(16 // per_pass, unroll=1):
            row = lanes.warp * 16 + i * per_pass + lanes.lane // rotation.lanes
            position = rows.token(lanes.warpgroup * WARPGROUP_ROWS + row) + shift
            rotation.rotate(lanes.lane, row, q_rows, q_rows, self.spec.tile.rows, position)
        tma.fence_async()
        ptx.sync_warp()
        return [scale for _ in self.tile.scores_layout.slots]
