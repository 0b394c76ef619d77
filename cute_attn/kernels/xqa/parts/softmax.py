"""Online softmax over columns: query rows are the columns of S^T, shared by lanes with the same lane % 4.

As in `kernels.blocks.softmax`, a column's anchor trails its maximum: it moves only when a score exceeds it by 2^SLACK.
Here that also saves the reduction over lanes, which only a move needs: every lane checks its own scores, and the warp
votes.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.scalars import device_scale
from cute_attn.kernels.blocks.softmax import INFINITY, SLACK, Running, add, any_of, tree


def log2_scale(p: Any, factor: float = 1.0) -> Float32:
    """Returns the factor from scores to base-2 exponents; `p`: XqaParams. K counts as `factor` times what it is."""
    device_scales = device_scale(p.scale0) * device_scale(p.scale1)
    return p.scale * device_scales * Float32(ptx.LOG2E * factor)


@dataclass(frozen=True)
class ColumnSoftmax:
    """Softmax of one warp. `s[4 * (m * row_blocks + block) + j]` is token 16 m + g + 8 (j // 2), column slot
    2 block + j % 2."""

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
        """Column slot of accumulator element i, for S^T and for O^T."""
        return i // 4 % self.row_blocks * 2 + i % 2

    def of_slot(self, values: list[Float32], slot: int) -> list[Float32]:
        return [x for i, x in enumerate(values) if self.slot(i) == slot]

    def largest(self, values: list[Float32]) -> Float32:
        return tree(ptx.fmax, values)

    @cute.jit
    def rescale_if_needed(self, running: Running, s: list[Float32]) -> Running:
        maxima = [self.largest(self.of_slot(s, slot)) for slot in self.slots]
        if cute.arch.vote_any_sync(any_of(self.exceeds_slack(running, maxima))):
            running = self.rescale(running, maxima)
        return running

    def exceeds_slack(self, running: Running, maxima: list[Float32]) -> list[Boolean]:
        return [
            ptx.fma(maximum, scale, shift) > Float32(self.slack)
            for maximum, scale, shift in zip(maxima, self.log2_scale, running.shift, strict=True)
        ]

    def rescale(self, running: Running, maxima: list[Float32]) -> Running:
        maxima = [reduce_column(ptx.fmax, maximum) for maximum in maxima]
        shift = [
            ptx.select(rise, Float32(0.0) - maximum * scale, old)
            for rise, maximum, scale, old in zip(
                self.exceeds_slack(running, maxima), maxima, self.log2_scale, running.shift, strict=True
            )
        ]
        # In a column that has seen no token both are infinite: the factor must not be NaN.
        factors = [
            ptx.select(new == old, Float32(1.0), ptx.exp2(new - old))
            for new, old in zip(shift, running.shift, strict=True)
        ]
        out = [x * factors[self.slot(i)] for i, x in enumerate(running.out)]
        return Running(out, shift, [x * factor for x, factor in zip(running.total, factors, strict=True)])

    def exponentials(self, s: list[Float32], shift: list[Float32]) -> list[Float32]:
        """exp2(s * c + shift). In a column that has seen no token, -inf and +inf must not be added."""
        finite = [ptx.select(x == Float32(INFINITY), Float32(0.0), x) for x in shift]
        return [ptx.exp2(ptx.fma(x, self.log2_scale[self.slot(i)], finite[self.slot(i)])) for i, x in enumerate(s)]

    def sums(self, p: list[Float32], total: list[Float32]) -> list[Float32]:
        return [tree(add, self.of_slot(p, slot)) + total[slot] for slot in self.slots]


@dataclass(frozen=True)
class PackedColumnSoftmax(ColumnSoftmax):
    """The softmax with two scores an instruction (sm_100 and later): the two columns of a lane lie side by side."""

    def largest(self, values: list[Float32]) -> Float32:
        """Maximum, three numbers at a time."""
        while len(values) > 1:
            threes = [values[i : i + 3] for i in range(0, len(values), 3)]
            values = [ptx.fmax(*x) if len(x) > 1 else x[0] for x in threes]
        return values[0]

    def exponentials(self, s: list[Float32], shift: list[Float32]) -> list[Float32]:
        finite = [ptx.select(x == Float32(INFINITY), Float32(0.0), x) for x in shift]
        scales, shifts = self._pairs(self.log2_scale), self._pairs(finite)
        blocks = [self.slot(i) // 2 for i in range(0, len(s), 2)]
        scaled = [sm100.fma_pair(x, scales[b], shifts[b]) for x, b in zip(self._pairs(s), blocks, strict=True)]
        return [ptx.exp2(x) for two in scaled for x in sm100.halves(two)]

    def sums(self, p: list[Float32], total: list[Float32]) -> list[Float32]:
        """Sums of both columns at once."""
        pairs, found = self._pairs(p), self._pairs(total)
        for block in range(self.row_blocks):
            mine = [x for i, x in enumerate(pairs) if self.slot(2 * i) // 2 == block]
            found[block] = sm100.add_pair(tree(sm100.add_pair, mine), found[block])
        return [x for two in found for x in sm100.halves(two)]

    def _pairs(self, values: list[Float32]) -> list[Int64]:
        return [sm100.pair(*values[i : i + 2]) for i in range(0, len(values), 2)]


def reduce_column(op, x):  # type: ignore[no-untyped-def]  # over traced values
    """Reduce over the eight lanes that share a column."""
    return ptx.reduce_lanes(op, x, (4, 8, 16))
