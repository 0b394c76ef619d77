"""The Hopper kernel for 16-bit q over fp8 K and V: transform warps dequantize every tile, the MMA warpgroups use 16-bit
operands.
"""

from typing import Any

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant_warps import DequantWarps
from cute_attn.kernels.blocks.kv_dequant import MIN_SCALE, OPERAND
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.scalars import device_scale
from cute_attn.kernels.blocks.scores import RowScales
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.kernel import Fa3Program
from cute_attn.kernels.fa3.parts.dequant import QNormalization
from cute_attn.kernels.fa3.parts.wgmma import AnyLanes, WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.fa3.smem import Fp8KvMemory
from cute_attn.kernels.fa3.spec import Fa3Spec


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
