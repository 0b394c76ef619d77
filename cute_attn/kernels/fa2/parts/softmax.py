"""Online softmax whose output accumulator stays in registers, rescaled where anchors move, and the products with V."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks.register_layout import RegisterLayout
from cute_attn.kernels.blocks.softmax import OnlineSoftmax, Rescale, any_of
from cute_attn.kernels.fa2.parts.mma import Lanes, WarpTile


class Running(NamedTuple):
    """Running state: the output accumulator; per row slot the shift and the sum of this thread's columns."""

    out: list[Float32]
    shift: list[Float32]
    total: list[Float32]


@dataclass(frozen=True, kw_only=True)
class RunningSoftmax(OnlineSoftmax):
    """Online softmax and the layout of its outputs."""

    output: RegisterLayout

    def start(self) -> Running:
        return Running(self.output.zeros(), self.no_anchors(), self.zero_sums())

    @cute.jit
    def rescale_if_needed(self, running: Running, s: list[Float32]) -> Running:
        """Raises the anchors of rows whose maximum exceeds the slack; rescales outputs and sums in the same branch."""
        row_max = self.row_max(s)
        exceeded = self.exceeded(running.shift, row_max)
        if cute.arch.vote_any_sync(any_of(exceeded)):
            running = self.rescaled(running, self.raised(running.shift, row_max, exceeded))
        return running

    def rescaled(self, running: Running, rescale: Rescale) -> Running:
        out = self.output.scale_rows(running.out, rescale.factors)
        total = [x * factor for x, factor in zip(running.total, rescale.factors, strict=True)]
        return Running(out, rescale.shift, total)


@dataclass(frozen=True)
class OwnRows:
    """Softmax of rows whose scores and outputs one warp holds, and the products with V."""

    tile: WarpTile
    softmax: RunningSoftmax
    lanes: Lanes

    def add(self, running: Running, s: list[Float32], operand: Int32, masked: bool) -> Running:
        """Adds a tile with scores `s` and 16-bit K and V at `operand` to the running state."""
        softmax = self.softmax
        running = softmax.rescale_if_needed(running, s)
        p = softmax.exponentials(s, running.shift, may_be_empty=masked)
        total = softmax.sums(p, running.total)
        v = operand + Int32(self.tile.memory.operand_v) + self.lanes.v
        out = self.tile.accumulate(running.out, self.tile.probabilities(p), v)
        return Running(out, running.shift, total)
