"""Tile whose MMA threads hold columns of q in registers, which leaves more shared memory bandwidth to K and V."""

from dataclasses import dataclass


from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.smem import swizzled
from cute_attn.kernels.fa3.parts.wgmma import WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.formats import LINE

STEPS = 4  # of a sum, in a column of 64 elements

RegisterQ = tuple[Int32, list[Int32]]  # descriptor of all columns, and the last ones in registers


@dataclass(frozen=True)
class RegisterQTile(WarpgroupTile):
    """Tile with the last `tile.q_columns` columns of q in registers."""

    @property
    def shared_steps(self) -> int:
        """Steps of the sum whose q lies in shared memory."""
        return self.steps - STEPS * self.memory.tile.q_columns

    @property
    def steps(self) -> int:
        return -(-self.memory.head_dim_qk // 16)

    def q_operand(self, address: Int32) -> RegisterQ:
        lanes, q = WarpgroupLanes.of(), []
        row, half = lanes.warp * 16 + lanes.lane % 16, lanes.lane // 16
        for step in range(self.shared_steps, self.steps):
            at = address + swizzled(row, half + step % STEPS * 2, LINE)
            q += ptx.ldmatrix_x4(at, step // STEPS * self.memory.tile.cta_rows * LINE)
        return super().q_operand(address), q

    def rematerialize(self, q: RegisterQ) -> RegisterQ:
        return super().rematerialize(q[0]), q[1]

    def scores(self, q: RegisterQ, k: Int32) -> list[Float32]:
        tile, steps = self.memory.tile, []
        for step in range(self.steps):
            column, within = step // STEPS, step % STEPS * 32
            steps.append((column * tile.cta_rows * LINE + within, column * tile.cols * LINE + within))
        shared, rest = steps[: self.shared_steps], [k_step for _, k_step in steps[self.shared_steps :]]
        s = sm90.wgmma_from_shared(self.dtype, tile.cols, q[0], k, shared) if shared else []
        return sm90.wgmma_from_registers(self.dtype, self.dtype, tile.cols, q[1], k, rest, s, k_major=True)
