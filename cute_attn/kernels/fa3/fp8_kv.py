"""The Hopper kernel for 16-bit q over fp8 K and V: transform warps dequantize every tile, the MMA warpgroups use 16-bit
operands.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.kv_dequant import (
    MIN_SCALE,
    OPERAND,
    DequantWarps,
    largest_magnitude,
    normalized,
    normalizing_factors,
)
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.scalars import device_scale
from cute_attn.kernels.blocks.scores import RowScales
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.kernel import Fa3Program
from cute_attn.kernels.fa3.parts.wgmma import AnyLanes, WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.fa3.smem import Fp8KvMemory
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.formats import LINE


@dataclass(frozen=True)
class QNormalization:
    """Normalization of a warp's 16 rows of q in shared memory, from bf16 to fp16, with two lanes per row."""

    memory: Fp8KvMemory
    lanes: WarpgroupLanes

    def run(self, q_rows: Int32, scale: Float32) -> list[Float32]:
        """Converts the rows; returns the factors for the scores of this lane's rows."""
        lane = self.lanes.lane
        at = q_rows + (self.lanes.warp * 16 + lane // 2) * LINE + lane % 2 * (LINE // 2)
        pitch = self.memory.tile.rows * LINE
        offsets = [column * pitch + 16 * i for column in range(self.memory.qk_columns) for i in range(4)]
        largest = Int32(0)
        for offset in offsets:
            largest = largest_magnitude(ptx.ld_shared_v4(at, offset), largest)
        largest = ptx.maximum(largest, ptx.shuffle_xor(largest, 1))
        factor, inverse = normalizing_factors(largest)
        for offset in offsets:
            ptx.st_shared_v4(at, offset, normalized(ptx.ld_shared_v4(at, offset), factor))
        tma.fence_async()
        ptx.sync_warp()
        layout = MmaFragmentLayout(1, 1)  # of scores; lanes 2 r and 2 r + 1 have normalized row r
        return [
            ptx.shuffle_from(scale * inverse, layout.lane_row(lane) * 2 + 2 * layout.row(slot)) for slot in layout.slots
        ]


class Fp8KvProgram(Fa3Program):
    """Hopper kernel for 16-bit q over fp8 K and V."""

    memory: Fp8KvMemory
    transform_type = DequantWarps

    def warpgroup_tile(self, spec: Fa3Spec, memory: Fp8KvMemory) -> WarpgroupTile:
        return WarpgroupTile(OPERAND, memory)

    def prepare_q(
        self, p: PersistentParams, work: QueryTile, lanes: WarpgroupLanes, q_rows: Int32, scale: Float32
    ) -> list[Float32]:
        """Returns a scale per row, after normalizing bf16 rows to fp16."""
        if self.spec.dtype == OPERAND:
            return [scale, scale]
        # Computed for every query tile: no register is free to hold it in between.
        scale = p.scale * device_scale(p.scale0) * device_scale(p.scale1)
        return QNormalization(self.memory, lanes).run(q_rows, scale)

    def softmax(self, p: PersistentParams, work: QueryTile, lanes: WarpgroupLanes, scale: Any) -> OnlineSoftmax:
        if self.spec.scores:
            return super().softmax(p, work, lanes, scale)
        return OnlineSoftmax(self.tile.scores_layout, [ptx.fmax(x, Float32(MIN_SCALE)) for x in scale])

    def scale_step(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes, scale: Any) -> RowScales:
        return RowScales(self.tile.scores_layout, lambda: scale)
