"""Online softmax over columns: query rows are the columns of S^T, and lanes with the same lane % 4 share them.

As in `kernels.blocks.softmax`, a column's anchor trails its maximum: it moves only when a score exceeds it by 2^SLACK.
Here that also saves the reduction over lanes, which only a move needs; whether one is due, every lane sees for itself.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.softmax import INFINITY, SLACK, add, tree


class Running(NamedTuple):
    """Output accumulator; per column slot minus the anchor in log2 units (+inf: nothing seen), and this lane's sum."""

    out: list[Float32]
    shift: list[Float32]
    total: list[Float32]


@dataclass(frozen=True)
class ColumnSoftmax:
    """`s[4 * (m * row_blocks + block) + j]`: token 16 m + g + 8 (j // 2), column slot 2 block + j % 2."""

    row_blocks: int
    out_tiles: int
    log2_scale: list[Float32]
    slack: float = SLACK

    @property
    def slots(self) -> range:
        return range(2 * self.row_blocks)

    def start(self) -> Running:
        zeros = [Float32(0.0) for _ in range(4 * self.out_tiles * self.row_blocks)]
        return Running(zeros, [Float32(INFINITY) for _ in self.slots], [Float32(0.0) for _ in self.slots])

    def slot(self, i: int) -> int:
        """Column slot of accumulator element i, of S^T and of O^T."""
        return i // 4 % self.row_blocks * 2 + i % 2

    def of_slot(self, values: list[Float32], slot: int) -> list[Float32]:
        return [x for i, x in enumerate(values) if self.slot(i) == slot]

    @cute.jit
    def settle(self, running: Running, s: list[Float32]) -> Running:
        highs = [tree(ptx.fmax, self.of_slot(s, slot)) for slot in self.slots]
        rises = self.rises(running, highs)
        any_rise = rises[0]
        for rise in rises[1:]:
            any_rise = cutlass.or_(any_rise, rise)
        if cute.arch.vote_any_sync(any_rise):
            running = self.raised(running, highs)
        return running

    def rises(self, running: Running, highs: list[Float32]) -> list[Boolean]:
        return [
            ptx.fma(high, scale, shift) > Float32(self.slack)
            for high, scale, shift in zip(highs, self.log2_scale, running.shift, strict=True)
        ]

    def raised(self, running: Running, highs: list[Float32]) -> Running:
        highs = [reduce_column(ptx.fmax, high) for high in highs]
        shift = [
            ptx.select(rise, Float32(0.0) - high * scale, old)
            for rise, high, scale, old in zip(
                self.rises(running, highs), highs, self.log2_scale, running.shift, strict=True
            )
        ]
        # Both infinite, a column that has seen nothing yet: its factor must not be NaN.
        factors = [
            ptx.select(new == old, Float32(1.0), ptx.exp2(new - old))
            for new, old in zip(shift, running.shift, strict=True)
        ]
        out = [x * factors[self.slot(i)] for i, x in enumerate(running.out)]
        return Running(out, shift, [x * factor for x, factor in zip(running.total, factors, strict=True)])

    def exponentials(self, s: list[Float32], shift: list[Float32]) -> list[Float32]:
        """exp2(s * c + shift). The two infinities of a column that has seen nothing must not meet."""
        finite = [ptx.select(x == Float32(INFINITY), Float32(0.0), x) for x in shift]
        return [ptx.exp2(ptx.fma(x, self.log2_scale[self.slot(i)], finite[self.slot(i)])) for i, x in enumerate(s)]

    def sums(self, p: list[Float32], total: list[Float32]) -> list[Float32]:
        return [tree(add, self.of_slot(p, slot)) + total[slot] for slot in self.slots]


def reduce_column(op, x):  # type: ignore[no-untyped-def]  # over traced values
    """Over the eight lanes that share a column."""
    for lane_mask in (4, 8, 16):
        x = op(x, ptx.shuffle_xor(x, lane_mask))
    return x
