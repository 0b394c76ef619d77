"""Tile of an MMA warpgroup whose threads hold q in registers: shared memory has more bandwidth for other operands."""

from dataclasses import dataclass

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.smem import swizzled
from cute_attn.kernels.fa3.parts.wgmma import WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.formats import LINE


@dataclass(frozen=True)
class RegisterQTile(WarpgroupTile):
    """Tile whose q is held in registers."""

    @property
    def steps(self) -> range:
        """Returns the steps of the sum of a score; of a last half one TMA has filled the rest with zeros."""
        return range(-(-self.memory.head_dim_qk // 16))

    def q_operand(self, address: Int32) -> list[Int32]:
        lanes, q = WarpgroupLanes.of(), []
        row, half = lanes.warp * 16 + lanes.lane % 16, lanes.lane // 16
        for step in self.steps:
            at = address + swizzled(row, half + step % 4 * 2, LINE)
            q += ptx.ldmatrix_x4(at, step // 4 * self.memory.tile.rows * LINE)
        return q

    def rematerialize(self, q: list[Int32]) -> list[Int32]:
        return q

    def scores(self, q: list[Int32], k: Int32) -> list[Float32]:
        cols = self.memory.tile.cols
        steps = [step // 4 * cols * LINE + step % 4 * 32 for step in self.steps]
        return sm90.wgmma_from_registers(self.dtype, self.dtype, cols, q, k, steps, k_major=True)
