"""Online softmax over row slots (Milakov & Gimelshein 2018, as FlashAttention-2 uses it).

Scores stay unscaled; `log2_scale` (c) turns them into base-2 exponents inside one FMA: p = exp2(s * c - anchor * c).
The anchor of a row is a reference that trails its maximum: it moves only when p would exceed 2^SLACK.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.fa2.parts.mma import WarpTile
from cute_attn.kernels.fa3.parts.wgmma import WarpgroupTile

SLACK = 8.0  # log2: p stays below 256, or, where only sums are tested, 256 per column of the thread: far below 65504
INFINITY = float("inf")
LARGEST = 2.0**127


class Running(NamedTuple):
    """Running state: the output accumulator; per row slot the negated anchor in log2 units (+inf before any visible
    key) and the sum.

    The anchor is kept negated, ready for the FMA of p = exp2(s * c + shift).
    """

    out: list[Float32]
    shift: list[Float32]
    total: list[Float32]


class Rescale(NamedTuple):
    """New shifts, and the factors that they imply for what was summed before."""

    shift: list[Float32]
    factors: list[Float32]


@dataclass(frozen=True)
class OnlineSoftmax:
    """Online softmax of one thread's part of a tile."""

    tile: WarpTile | WarpgroupTile
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
    def rescale_if_needed(self, running: Running, s: list[Float32]) -> Running:
        """Raises the anchor of rows whose maximum exceeds it by more than SLACK, and rescales their outputs and sums.

        An anchor below the maximum is as good as the maximum while exp2 of the difference stays small. So most tiles
        rescale nothing: only the first does, and tiles where scores grow a lot.
        """
        row_max = self.row_max(s)
        exceeded = [
            ptx.fma(high, self.log2_scale, shift) > Float32(SLACK)
            for high, shift in zip(row_max, running.shift, strict=True)
        ]
        any_exceeded = exceeded[0]
        for exceeds in exceeded[1:]:
            any_exceeded = cutlass.or_(any_exceeded, exceeds)
        if cute.arch.vote_any_sync(any_exceeded):
            running = self.rescale(running, row_max, exceeded)
        return running

    def rescale(self, running: Running, row_max: list[Float32], exceeded: list[Boolean]) -> Running:
        shift = [
            ptx.select(exceeds, Float32(0.0) - high * self.log2_scale, old)
            for exceeds, high, old in zip(exceeded, row_max, running.shift, strict=True)
        ]
        factors = [
            ptx.select(exceeds, ptx.exp2(new - old), Float32(1.0))
            for exceeds, new, old in zip(exceeded, shift, running.shift, strict=True)
        ]
        per_m = len(running.out) // self.tile.m_blocks
        out = [x * factors[i // per_m * 2 + i % 4 // 2] for i, x in enumerate(running.out)]
        return Running(out, shift, [x * factor for x, factor in zip(running.total, factors, strict=True)])

    def row_max(self, s: list[Float32]) -> list[Float32]:
        return [reduce_quad(ptx.fmax, tree(ptx.fmax, [s[i] for i in self.columns(slot)])) for slot in self.slots]

    def first_shift(self, s: list[Float32]) -> list[Float32]:
        """Returns the shifts of the first scores: +inf where all are hidden."""
        return [self.anchor(high, slot) for slot, high in enumerate(self.row_max(s))]

    def anchor(self, high: Float32, slot: int) -> Float32:
        """Returns the shift of a row whose maximum is `high`."""
        return Float32(0.0) - high * self.scale(slot)

    @cute.jit
    def rescale_factors(self, shift: list[Float32], s: list[Float32]) -> Rescale:
        """Raises anchors as `rescale_if_needed` does, for an output that is still being summed: the caller applies the
        factors.
        """
        slack, row_max = Float32(self.slack), self.row_max(s)
        exceeded = [
            ptx.fma(high, self.scale(i), old) > slack for i, (high, old) in enumerate(zip(row_max, shift, strict=True))
        ]
        any_exceeded = cute.arch.vote_any_sync(cutlass.or_(exceeded[0], exceeded[1]))
        factors = [Float32(1.0) for _ in self.slots]
        if any_exceeded:
            new = [
                ptx.select(exceeds, self.anchor(high, i), old)
                for i, (exceeds, high, old) in enumerate(zip(exceeded, row_max, shift, strict=True))
            ]
            factors = [
                ptx.select(exceeds, ptx.exp2(a - b), Float32(1.0))
                for exceeds, a, b in zip(exceeded, new, shift, strict=True)
            ]
            shift = new
        return Rescale(shift, factors)

    def finite(self, shift: list[Float32]) -> list[Float32]:
        """Gives rows without an anchor one far below any score: hidden scores then yield 0, all others infinity."""
        return [ptx.fmin(x, Float32(LARGEST)) for x in shift]

    def exceeds_slack(self, sums: list[Float32]) -> Boolean:
        """Whether some of this thread's exponentials exceed 2^SLACK, or a row had no anchor (sum infinite or NaN)."""
        limit = Float32(2.0**SLACK * len(self.columns(0)))
        return cutlass.or_(*(cutlass.Boolean(sums[slot] <= limit) == cutlass.Boolean(False) for slot in self.slots))

    def exponentials(self, s: list[Float32], shift: list[Float32], may_be_empty: bool) -> list[Float32]:
        """Computes exp2(s * c + shift). `may_be_empty`: a row may have no visible key yet; -inf + inf would be NaN."""
        p = list(s)
        for slot in self.slots:
            finite = shift[slot]
            if may_be_empty:
                finite = ptx.select(finite == Float32(INFINITY), Float32(0.0), finite)
            for i in self.columns(slot):
                p[i] = ptx.exp2(ptx.fma(s[i], self.scale(slot), finite))
        return p

    def sums(self, p: list[Float32], total: list[Float32]) -> list[Float32]:
        """Adds to the running sums per thread; those of a quad are reduced once, at the end."""
        return [tree(add, [p[i] for i in self.columns(slot)]) + total[slot] for slot in self.slots]


def add(a: Float32, b: Float32) -> Float32:
    return a + b


def tree(op, values):  # type: ignore[no-untyped-def]  # over traced values
    """Reduces in a balanced tree: depth log2 n instead of a chain of n dependent operations."""
    while len(values) > 1:
        paired = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[len(paired) * 2 :]
    return values[0]


def reduce_quad(op, x):  # type: ignore[no-untyped-def]
    """Reduces over the four lanes that share a row of an MMA accumulator."""
    for lane_mask in (1, 2):
        x = op(x, ptx.shuffle_xor(x, lane_mask))
    return x
