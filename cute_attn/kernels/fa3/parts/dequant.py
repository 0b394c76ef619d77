"""q of the kernel for fp8 K and V: its rows normalized to fp16."""

from dataclasses import dataclass

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.kv_dequant import largest_magnitude, normalized, normalizing_factors
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.fa3.parts.wgmma import WarpgroupLanes
from cute_attn.kernels.fa3.smem import Fp8KvMemory
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
        largest = ptx.maximum(largest, ptx.shuffle_xor_b32(largest, 1))
        factor, inverse = normalizing_factors(largest)
        for offset in offsets:
            ptx.st_shared_v4(at, offset, normalized(ptx.ld_shared_v4(at, offset), factor))
        tma.fence_async()
        ptx.sync_warp()
        layout = MmaFragmentLayout(1, 1)  # of scores; lanes 2 r and 2 r + 1 have normalized row r
        return [
            ptx.shuffle_from(scale * inverse, layout.lane_row(lane) * 2 + 2 * layout.row(slot)) for slot in layout.slots
        ]
