"""fp8 operands: P in e4m3, four keys per column of tensor memory, from exponentials that stay in its range."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.softmax import P_DTYPE, P_MAX, PEAK_LOG2, E4m3Softmax, tree
from cute_attn.kernels.fa4.parts.exp2 import PairExp2, PairSums
from cute_attn.kernels.fa4.parts.umma import CHUNK_COLUMNS, UmmaTile

SUM_LIMIT = P_MAX  # of every other P of a chunk: no element then exceeds e4m3's maximum
SIGN = -(1 << 31)
NEG_INF = -(1 << 23)  # bits of fp32


@dataclass(frozen=True)
class Fp8Tile(UmmaTile):
    """Operands of 8 bits; P is e4m3 whatever they are."""

    @property
    def p_dtype(self) -> str:
        return P_DTYPE

    def probabilities(self, s: list[Float32]) -> list[Int32]:
        return [ptx.pack_8(P_DTYPE, s[i : i + 4]) for i in range(0, len(s), 4)]


class Fp8Sums(NamedTuple):
    """Sums of a row, and the largest sum of the even or of the odd columns of a chunk."""

    row: PairSums
    largest: Float32


@dataclass(frozen=True)
class Fp8Exp2(PairExp2):
    """exp2 whose sums show whether a P may exceed e4m3's range: a row's sum alone would leave it few bits."""

    def zero_sums(self) -> Fp8Sums:  # type: ignore[override]
        return Fp8Sums(super().zero_sums(), Float32(0.0))

    def add(self, sums: Fp8Sums, s: list[Float32], p: list[Float32]) -> Fp8Sums:  # type: ignore[override]
        chunk = tree(sm100.add_pair, [sm100.pair(p[i], p[i + 1]) for i in range(0, len(p), 2)])
        row = PairSums(sm100.add_pair(sums.row.pairs, chunk), self.largest_score(sums.row.high, s))
        return Fp8Sums(row, sm100.fmax3_nan(sums.largest, *sm100.halves(chunk)))

    def sum(self, sums: Fp8Sums) -> Float32:  # type: ignore[override]
        low, high = sm100.halves(sums.row.pairs)
        if not self.polynomial:
            return low + high
        # The largest score may be infinite: that of a hidden column, if the scale is negative.
        largest = sums.row.high
        return ptx.select(largest == largest, low + high, largest)


@dataclass(frozen=True)
class Fp8Softmax(E4m3Softmax):
    """Softmax with a scale per row that may be negative but not 0."""

    p_log2 = 4.0

    @property
    def slack(self) -> float:
        """Slack in log2: while no element of P exceeds it, no sum reaches `SUM_LIMIT`."""
        return math.log2(SUM_LIMIT / (CHUNK_COLUMNS // 2)) - 0.01

    @property
    def sign(self) -> Int32:
        """Sign bit of the scale."""
        return ptx.bits(self.log2_scales[0]) & Int32(SIGN)

    @property
    def hidden(self) -> Float32:
        """Returns the score of a hidden column: infinite, and times the scale negative."""
        return ptx.from_bits(self.sign ^ Int32(NEG_INF))

    def ascending(self, s: list[Float32]) -> list[Float32]:
        """Returns scores times the sign of the scale."""
        sign = self.sign
        return [ptx.from_bits(ptx.bits(x) ^ sign) for x in s]

    def exponent(self, high: Float32, shift: Float32, slot: int = 0) -> Float32:
        """Returns log2 of the largest P, from the largest of the `ascending` scores."""
        return ptx.fma(high, ptx.magnitude(self.log2_scales[slot]), shift)

    def headroom(self, largest: Float32, total: Float32) -> Float32:
        """Returns the exponent by which the row's P may grow: it has seen few keys near its maximum, and neither its
        sum so far nor `largest`, log2 of the largest P of the tile at hand, gets too large.
        """
        room = ptx.fmin(Float32(PEAK_LOG2) - ptx.log2(total), Float32(self.slack) - largest)
        return self.raised_by(room)
