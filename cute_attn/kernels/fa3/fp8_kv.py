"""The Hopper kernel for 16-bit q over fp8 K and V: transform warps dequantize every tile, the MMA warpgroups use 16-bit
operands.
"""

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.kv_dequant import DequantWarps, normalize
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.scores import score_scale
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.kernel import Fa3Program
from cute_attn.kernels.fa3.parts.wgmma import WarpgroupLanes
from cute_attn.kernels.fa3.smem import Fp8KvMemory
from cute_attn.kernels.formats import LINE


class Fp8KvProgram(Fa3Program):
    """Hopper kernel for 16-bit q over fp8 K and V."""

    memory: Fp8KvMemory
    transform_type = DequantWarps

    def prepare_q(
        self, p: PersistentParams, work: QueryTile, lanes: WarpgroupLanes, q_rows: Int32, scale: Float32
    ) -> list[Float32]:
        """Returns a scale per row, after normalizing bf16 rows to fp16."""
        if not self.spec.normalizes_q:
            return super().prepare_q(p, work, lanes, q_rows, scale)
        # Computed for every query tile: no register is free to hold it in between.
        scale = score_scale(p)
        inverse = self.normalize(q_rows, lanes)
        layout = MmaFragmentLayout(1, 1)  # of scores; lanes 2 r and 2 r + 1 have normalized row r
        return [
            ptx.shuffle_from(scale * inverse, layout.lane_row(lanes.lane) * 2 + 2 * layout.row(slot))
            for slot in layout.slots
        ]

    def normalize(self, q_rows: Int32, lanes: WarpgroupLanes) -> Float32:
        """Normalizes the 16 rows of a warp, with two lanes per row; returns the inverse factor of this lane's."""
        at = q_rows + (lanes.warp * 16 + lanes.lane // 2) * LINE + lanes.lane % 2 * (LINE // 2)
        pitch = self.memory.tile.rows * LINE
        places = [(at, column * pitch + 16 * i) for column in range(self.memory.qk_columns) for i in range(4)]
        inverse = normalize(places, lambda x: ptx.maximum(x, ptx.shuffle_xor(x, 1)))
        tma.fence_async()
        ptx.sync_warp()
        return inverse
