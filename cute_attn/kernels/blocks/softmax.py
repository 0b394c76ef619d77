"""Online softmax over row slots (Milakov & Gimelshein 2018, as FlashAttention-2 uses it).

Scores stay unscaled; `log2_scales` (c) turn them into base-2 exponents inside one FMA: p = exp2(s * c - anchor * c).
The anchor of a row is a reference that trails its maximum: it moves only when p would exceed 2^SLACK. It is kept as a
shift: negated and scaled, ready for the FMA; +inf before any visible key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import RegisterLayout

SLACK = 8.0  # log2: p stays below 256, or, where only sums are tested, 256 per column of the thread: far below 65504
INFINITY = float("inf")
LARGEST = 2.0**127


class Rescale(NamedTuple):
    """New shifts, and the factors that they imply for what was summed before."""

    shift: list[Float32]
    factors: list[Float32]


class Exp2:
    """How one thread's scores of a row become exponentials, and how these are summed: by ex2.approx for all registers.

    Both methods receive all registers of a row slot, so that instructions may differ by register and serve pairs. They
    are two because the place of the sums in the program is the kernel's choice: fa3 votes on them before it packs P.
    """

    def exponentials(self, s: list[Float32], scale: Float32, shift: Float32) -> list[Float32]:
        """Computes exp2(s * scale + shift)."""
        return [ptx.exp2(ptx.fma(x, scale, shift)) for x in s]

    def sum(self, p: list[Float32]) -> Float32:
        """Sums exponentials."""
        return tree(add, p)


EXP2 = Exp2()


@dataclass(frozen=True)
class OnlineSoftmax:
    """Online softmax of one thread's part of a tile, with a scale per row slot."""

    layout: RegisterLayout
    log2_scales: Sequence[Float32]
    exp2: Exp2 = EXP2

    @property
    def slack(self) -> float:
        return SLACK

    @property
    def slots(self) -> range:
        return self.layout.slots

    @property
    def hidden(self) -> Float32:
        """Score of a hidden column."""
        return Float32(ptx.NEG_INF)

    def ascending(self, s: list[Float32]) -> list[Float32]:
        """Returns scores of which the largest has the largest exponential."""
        return s

    def no_anchors(self) -> list[Float32]:
        """Returns the shifts of rows that have seen no key yet."""
        return [Float32(INFINITY) for _ in self.slots]

    def zero_sums(self) -> list[Float32]:
        return [Float32(0.0) for _ in self.slots]

    def row_max(self, s: list[Float32]) -> list[Float32]:
        return [self.layout.reduce(ptx.fmax, tree(ptx.fmax, self.layout.of_slot(s, slot))) for slot in self.slots]

    def first_shift(self, s: list[Float32]) -> list[Float32]:
        """Returns the shifts of the first scores: +inf where all are hidden."""
        return [self.anchor(high, slot) for slot, high in enumerate(self.row_max(s))]

    def exponent(self, high: Float32, shift: Float32, slot: int = 0) -> Float32:
        """Returns log2 of the exponential of a score."""
        return ptx.fma(high, self.log2_scales[slot], shift)

    def anchor(self, high: Float32, slot: int) -> Float32:
        """Returns the shift of a row whose maximum is `high`."""
        return Float32(0.0) - high * self.log2_scales[slot]

    @cute.jit
    def rescale_factors(self, shift: list[Float32], s: list[Float32], sums: list[Float32]) -> Rescale:
        """Raises the anchor of rows whose `sums` exceed the slack to their maximum; the caller applies the factors to
        sums and outputs. Whether a row's anchor moves depends on its own scores alone, not on rows beside it.

        An anchor below the maximum is as good as the maximum while exp2 of the difference stays small. So most tiles
        rescale nothing: only the first does, and tiles where scores grow a lot.
        """
        factors = [Float32(1.0) for _ in self.slots]
        exceeded = [self.of_row(x) for x in self.sums_exceed(sums)]
        if cute.arch.vote_any_sync(any_of(exceeded)):
            shift, factors = self.raised(shift, self.row_max(s), exceeded)
        return Rescale(shift, factors)

    def of_row(self, condition: Boolean) -> Boolean:
        """Whether a condition holds in any thread of a row."""
        return self.layout.reduce(ptx.fmax, ptx.select(condition, Float32(1.0), Float32(0.0))) > Float32(0.0)

    def exceeded(self, shift: list[Float32], row_max: list[Float32]) -> list[Boolean]:
        """Returns which rows' maxima exceed their anchors by more than the slack."""
        return [
            ptx.fma(high, scale, old) > Float32(self.slack)
            for high, scale, old in zip(row_max, self.log2_scales, shift, strict=True)
        ]

    def raised(self, shift: list[Float32], row_max: list[Float32], exceeded: list[Boolean]) -> Rescale:
        """Moves the anchors of the rows in `exceeded` to their maxima."""
        new = [
            ptx.select(exceeds, self.anchor(high, slot), old)
            for slot, (exceeds, high, old) in enumerate(zip(exceeded, row_max, shift, strict=True))
        ]
        return self.moved(shift, new, exceeded)

    def moved(self, shift: list[Float32], new: list[Float32], which: list[Boolean]) -> Rescale:
        """Returns the factors of the rows in `which`, whose shifts become `new`."""
        factors = [
            ptx.select(moves, ptx.exp2(a - b), Float32(1.0)) for moves, a, b in zip(which, new, shift, strict=True)
        ]
        return Rescale(new, factors)

    def finite(self, shift: list[Float32]) -> list[Float32]:
        """Gives rows without an anchor one far below any score: hidden scores then yield 0, all others infinity."""
        return [ptx.fmin(x, Float32(LARGEST)) for x in shift]

    @property
    def sum_limit(self) -> float:
        """The largest sum of a thread's exponentials that leaves an anchor where it is."""
        return 2.0**SLACK * self.layout.columns_per_thread

    def sums_exceed(self, sums: list[Float32]) -> list[Boolean]:
        """Returns of which rows this thread's exponentials sum to more than the limit, or had no anchor (infinite or
        NaN).
        """
        return [Boolean(total <= Float32(self.sum_limit)) == Boolean(False) for total in sums]

    def exceeds_slack(self, sums: list[Float32]) -> Boolean:
        """Whether the anchor of one of this thread's rows must move."""
        return any_of(self.sums_exceed(sums))

    def exponentials(self, s: list[Float32], shift: list[Float32], may_be_empty: bool) -> list[Float32]:
        """Computes exp2(s * c + shift). `may_be_empty`: a row may have no visible key yet; -inf + inf would be NaN."""
        p = list(s)
        for slot in self.slots:
            finite = shift[slot]
            if may_be_empty:
                finite = ptx.select(finite == Float32(INFINITY), Float32(0.0), finite)
            row = self.exp2.exponentials(self.layout.of_slot(s, slot), self.log2_scales[slot], finite)
            for (register, _), x in zip(self.layout.places(slot), row, strict=True):
                p[register] = x
        return p

    def sums(self, p: list[Float32], total: list[Float32]) -> list[Float32]:
        """Adds to the sums per thread; those of a row are reduced once, at the end."""
        return [self.exp2.sum(self.layout.of_slot(p, slot)) + total[slot] for slot in self.slots]


class Running(NamedTuple):
    """Running state: the output accumulator; per row slot the shift and the sum of this thread's columns."""

    out: list[Float32]
    shift: list[Float32]
    total: list[Float32]


@dataclass(frozen=True, kw_only=True)
class RunningSoftmax(OnlineSoftmax):
    """Online softmax whose outputs stay in registers, laid out as `output`, rescaled where anchors move."""

    output: RegisterLayout

    def start(self) -> Running:
        return Running(self.output.zeros(), self.no_anchors(), self.zero_sums())

    @cute.jit
    def raise_anchors(self, running: Running, row_max: list[Float32]) -> Running:
        """Raises the anchors of rows whose maximum exceeds the slack; rescales outputs and sums in the same branch."""
        exceeded = self.exceeded(running.shift, row_max)
        if cute.arch.vote_any_sync(any_of(exceeded)):
            running = self.rescaled(running, self.raised(running.shift, row_max, exceeded))
        return running

    def rescaled(self, running: Running, rescale: Rescale) -> Running:
        out = self.output.scale_rows(running.out, rescale.factors)
        total = [x * factor for x, factor in zip(running.total, rescale.factors, strict=True)]
        return Running(out, rescale.shift, total)


P_DTYPE = "float8_e4m3fn"
P_MAX = 448.0  # of e4m3, which has full precision from 2^-6
PEAK_LOG2 = 7.1  # to which rows dominated by one key are raised; leaves room for a peak up to three times as high
MAX_RAISE = 4.0  # log2, at a time


@dataclass(frozen=True)
class E4m3Softmax(OnlineSoftmax):
    """Online softmax with P in the range of e4m3: the largest P right after a rescale is 2^`p_log2`."""

    p_log2: ClassVar[float]

    def anchor(self, high: Float32, slot: int) -> Float32:
        return self.exponent(Float32(0.0) - high, Float32(self.p_log2), slot)

    def raised_by(self, room: Float32) -> Float32:
        """Returns the exponent by which the P of a row grow, if there is `room` (log2) for it."""
        return ptx.fmin(ptx.fmax(ptx.floor(room), Float32(0.0)), Float32(MAX_RAISE))


def add(a: Float32, b: Float32) -> Float32:
    return a + b


def any_of(conditions: list[Boolean]) -> Boolean:
    return reduce(cutlass.or_, conditions)


def tree(op, values):  # type: ignore[no-untyped-def]  # over traced values
    """Reduces in a balanced tree: depth log2 n instead of a chain of n dependent operations."""
    while len(values) > 1:
        paired = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[len(paired) * 2 :]
    return values[0]
