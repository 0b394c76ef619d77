"""Softmax of a warp's own rows, and the products with V."""

from dataclasses import dataclass

from cutlass import Float32, Int32

from cute_attn.kernels.blocks.softmax import Running, RunningSoftmax
from cute_attn.kernels.fa2.parts.mma import Lanes, WarpTile


@dataclass(frozen=True)
class OwnRows:
    """Softmax of rows whose scores and outputs one warp holds, and the products with V."""

    tile: WarpTile
    softmax: RunningSoftmax
    lanes: Lanes

    def add(self, running: Running, s: list[Float32], operand: Int32, masked: bool) -> Running:
        """Adds a tile with scores `s` and 16-bit K and V at `operand` to the running state."""
        softmax = self.softmax
        running = softmax.raise_anchors(running, softmax.row_max(s))
        p = softmax.exponentials(s, running.shift, may_be_empty=masked)
        total = softmax.sums(p, running.total)
        v = operand + Int32(self.tile.memory.operand_v) + self.lanes.v
        out = self.tile.accumulate(running.out, self.tile.probabilities(p), v)
        return Running(out, running.shift, total)
