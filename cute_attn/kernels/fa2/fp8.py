"""mma.sync kernel for q, k and v in fp8: the loop of the 16-bit kernel over 8-bit tiles, multiplied as stored.

For GPUs whose mma.sync multiplies fp8 itself (sm_120a, sm_121a): for sm_100a ptxas makes it conversions and 16-bit
products.
"""

from cutlass import Float32, Int32

from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.blocks.fp8_scales import ScaledPartialEpilogue
from cute_attn.kernels.blocks.scalars import device_scale, head_scale
from cute_attn.kernels.blocks.scores import RowScales
from cute_attn.kernels.fa2.kernel import Fa2Params, Fa2Program
from cute_attn.kernels.fa2.parts.fp8 import Fp8Softmax, Fp8WarpTile
from cute_attn.kernels.fa2.parts.mma import Lanes
from cute_attn.kernels.fa2.parts.tile_scheduler import WorkTile


class Fp8Program(Fa2Program):
    """mma.sync kernel for q, k and v in fp8, with scales per head."""

    softmax_type = Fp8Softmax
    min_ctas = 1  # without it ptxas spills a word or two to reach 128 or 168 registers

    def warp_tile(self) -> Fp8WarpTile:
        return Fp8WarpTile(self.spec.dtype, self.memory)

    def scale_step(self, p: Fa2Params, work: WorkTile, lanes: Lanes, scale: Float32) -> RowScales:
        """Returns the scales of the thread's rows, which may have any sign."""
        common, rows = scale * head_scale(p.scale_k, work.kv_head), work.rows(p)
        layout = self.tile.scores_layout
        scales = [common * head_scale(p.scale_q, rows.head(lanes.row(slot))) for slot in layout.slots]
        return RowScales(layout, lambda: scales)

    def final_epilogue(self, p: Fa2Params, kv_head: Int32) -> FinalEpilogue:
        scale = p.v_scale * device_scale(p.v_scale_ptr) * head_scale(p.scale_v, kv_head)
        return FinalEpilogue(p.sinks, scale, p.lse_scale)

    def partial_epilogue(self, p: Fa2Params, kv_head: Int32) -> ScaledPartialEpilogue:
        return ScaledPartialEpilogue(head_scale(p.scale_v, kv_head))
