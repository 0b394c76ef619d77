"""Online softmax over row slots (Milakov & Gimelshein 2018, as FlashAttention-2 uses it).

Scores stay in their own unit; `log2_scale` turns them into base-2 exponents inside one FMA: p = exp2(s * c - max * c).
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.fa2.parts.mma import WarpTile
from cute_attn.kernels.fa3.parts.wgmma import GroupTile

SLACK = 8.0  # log2: p stays below 256, or where only sums are asked below 256 a column of the thread: far from 65504
INFINITY = float("inf")
LARGEST = 2.0**127


class Running(NamedTuple):
    """Per warp: output accumulator; per row slot: minus the anchor in log2 units (+inf: nothing seen), and the sum.

    p = exp2(s * c + shift): the anchor that exponents are relative to is kept negated, ready for that FMA.
    """

    out: list[Float32]
    shift: list[Float32]
    total: list[Float32]


class Risen(NamedTuple):
    """New shifts, the factors that they mean for what was summed before, and whether the warp has any but 1."""

    shift: list[Float32]
    factors: list[Float32]
    some: Boolean


@dataclass(frozen=True)
class OnlineSoftmax:
    tile: WarpTile | GroupTile
    log2_scale: Float32

    @property
    def slack(self) -> float:
        return SLACK

    @property
    def slots(self) -> range:
        return range(self.tile.row_slots)

    def scale(self, slot: int) -> Float32:
        return self.log2_scale

    def start(self) -> Running:
        zeros = [Float32(0.0) for _ in self.slots]
        return Running(self.tile.zeros(self.tile.d_blocks), [Float32(INFINITY) for _ in self.slots], zeros)

    def columns(self, slot: int) -> list[int]:
        """Indices of a row slot's scores in the flat accumulator."""
        m, half = divmod(slot, 2)
        start = 4 * m * self.tile.n_blocks + 2 * half
        return [start + 4 * n + j for n in range(self.tile.n_blocks) for j in (0, 1)]

    @cute.jit
    def settle(self, running: Running, s: list[Float32]) -> Running:
        """Raises the anchor of rows whose highest score is more than SLACK above it.

        An anchor below the maximum is as good as the maximum while exp2 of the difference stays small. So nothing is
        rescaled in most tiles: only in the first, and where scores grow a lot.
        """
        highs = [reduce_quad(ptx.fmax, tree(ptx.fmax, [s[i] for i in self.columns(slot)])) for slot in self.slots]
        rises = [
            ptx.fma(high, self.log2_scale, shift) > Float32(SLACK)
            for high, shift in zip(highs, running.shift, strict=True)
        ]
        any_rise = rises[0]
        for rise in rises[1:]:
            any_rise = cutlass.or_(any_rise, rise)
        if cute.arch.vote_any_sync(any_rise):
            running = self.raised(running, highs, rises)
        return running

    def raised(self, running: Running, highs: list[Float32], rises: list[Boolean]) -> Running:
        shift = [
            ptx.select(rise, Float32(0.0) - high * self.log2_scale, old)
            for rise, high, old in zip(rises, highs, running.shift, strict=True)
        ]
        factors = [
            ptx.select(rise, ptx.exp2(new - old), Float32(1.0))
            for rise, new, old in zip(rises, shift, running.shift, strict=True)
        ]
        per_m = len(running.out) // self.tile.m_blocks
        out = [x * factors[i // per_m * 2 + i % 4 // 2] for i, x in enumerate(running.out)]
        return Running(out, shift, [x * factor for x, factor in zip(running.total, factors, strict=True)])

    def highs(self, s: list[Float32]) -> list[Float32]:
        return [reduce_quad(ptx.fmax, tree(ptx.fmax, [s[i] for i in self.columns(slot)])) for slot in self.slots]

    def first_shift(self, s: list[Float32]) -> list[Float32]:
        """Shifts of the first scores: +inf where all are hidden."""
        return [self.anchor(high, slot) for slot, high in enumerate(self.highs(s))]

    def anchor(self, high: Float32, slot: int) -> Float32:
        """The shift of a row with that highest score."""
        return Float32(0.0) - high * self.scale(slot)

    @cute.jit
    def rise(self, shift: list[Float32], s: list[Float32]) -> Risen:
        """`settle` for an output that is still being summed: the caller applies the factors."""
        slack, highs = Float32(self.slack), self.highs(s)
        rises = [
            ptx.fma(high, self.scale(i), old) > slack for i, (high, old) in enumerate(zip(highs, shift, strict=True))
        ]
        some = cute.arch.vote_any_sync(cutlass.or_(rises[0], rises[1]))
        factors = [Float32(1.0) for _ in self.slots]
        if some:
            new = [
                ptx.select(rise, self.anchor(high, i), old)
                for i, (rise, high, old) in enumerate(zip(rises, highs, shift, strict=True))
            ]
            factors = [
                ptx.select(rise, ptx.exp2(a - b), Float32(1.0)) for rise, a, b in zip(rises, new, shift, strict=True)
            ]
            shift = new
        return Risen(shift, factors, some)

    def finite(self, shift: list[Float32]) -> list[Float32]:
        """A row that has no anchor yet gets one far below any score: hidden scores give 0, any other infinity."""
        return [ptx.fmin(x, Float32(LARGEST)) for x in shift]

    def too_high(self, sums: list[Float32]) -> Boolean:
        """Of this thread's exponentials of a tile: some is above 2^SLACK, or a row had no anchor (infinite, or NaN)."""
        limit = Float32(2.0**SLACK * len(self.columns(0)))
        return cutlass.or_(*(cutlass.Boolean(sums[slot] <= limit) == cutlass.Boolean(False) for slot in self.slots))

    def exponentials(self, s: list[Float32], shift: list[Float32], may_be_empty: bool) -> list[Float32]:
        """exp2(s * c + shift). `may_be_empty`: a row may have seen nothing yet; its two infinities must not meet."""
        p = list(s)
        for slot in self.slots:
            finite = shift[slot]
            if may_be_empty:
                finite = ptx.select(finite == Float32(INFINITY), Float32(0.0), finite)
            for i in self.columns(slot):
                p[i] = ptx.exp2(ptx.fma(s[i], self.scale(slot), finite))
        return p

    def sums(self, p: list[Float32], total: list[Float32]) -> list[Float32]:
        """Running sums, per thread: the quad's are added up once, at the end."""
        return [tree(add, [p[i] for i in self.columns(slot)]) + total[slot] for slot in self.slots]


def add(a: Float32, b: Float32) -> Float32:
    return a + b


def tree(op, values):  # type: ignore[no-untyped-def]  # over traced values
    """Balanced reduction: depth log2 n instead of a chain of n dependent operations."""
    while len(values) > 1:
        paired = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[len(paired) * 2 :]
    return values[0]


def reduce_quad(op, x):  # type: ignore[no-untyped-def]
    """Over the four lanes that share a row of an MMA accumulator."""
    for lane_mask in (1, 2):
        x = op(x, ptx.shuffle_xor(x, lane_mask))
    return x
