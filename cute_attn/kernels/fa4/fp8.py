"""Blackwell kernel for q, k and v in fp8: the roles and rings of the 16-bit kernel, at twice the products per clock.

V is MN-major as stored, which tcgen05 takes of any type: nothing is transposed. O is not promoted: how many bits a fp8
product accumulates in is not known of this chip. P is e4m3, four keys per column of tensor memory, from exponentials
that stay in its range.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.scores import MIN_SCALE, RowScales, row_scale
from cute_attn.kernels.blocks.softmax import P_DTYPE, P_MAX, PEAK_LOG2, E4m3Softmax, tree
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.kernel import Fa4Program
from cute_attn.kernels.fa4.parts.exp2 import PairExp2, PairSums
from cute_attn.kernels.fa4.parts.umma import CHUNK_COLUMNS, RowLanes, UmmaTile
from cute_attn.kernels.fa4.smem import Fp8Memory
from cute_attn.kernels.fa4.softmax_warps import RowState, SoftmaxContext, SoftmaxWarps

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
        return Fp8Sums(row, ptx.fmax_nan(sums.largest, *sm100.halves(chunk)))

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


# --- the kernel -------------------------------------------------------------------------------------------------------


RAISE_KEYS = 1024  # after which rows dominated by one key are raised in the range of e4m3


class Fp8SoftmaxWarps(SoftmaxWarps):
    """Softmax warps whose P is e4m3: rows with small sums are raised, so that probabilities far below the row's peak no
    longer underflow.
    """

    def limit(self, context: SoftmaxContext) -> float:
        return SUM_LIMIT

    def level(self, sums: Fp8Sums, total: Float32) -> Float32:  # type: ignore[override]
        return sums.largest

    def due(self, kv_tile: Int32) -> Boolean:
        return kv_tile % (RAISE_KEYS // self.spec.tile.cols) == Int32(0)

    @cute.jit
    def raises_first(self, state: RowState, kv_tile: Int32, first: Boolean) -> Boolean:
        """Returns whether it is the first tile, or every `RAISE_KEYS` keys, whether any row of the warp has room."""
        raises = first
        if self.due(kv_tile):
            small = cutlass.and_(state.total > Float32(0.0), state.total < Float32(2.0 ** (PEAK_LOG2 - 1)))
            raises = cutlass.or_(first, cute.arch.vote_any_sync(small))
        return raises

    def raised(
        self, context: SoftmaxContext, high: Float32, shift: Float32, total: Float32, kv_tile: Int32
    ) -> tuple[Float32, Float32]:
        """Raises the row where its sum is small, beside what all forms do."""
        softmax: Any = context.softmax
        largest = softmax.exponent(high, softmax.finite([shift])[0])
        lowered, factor = super().raised(context, high, shift, total, kv_tile)
        fits = Boolean(largest <= Float32(softmax.slack))
        room = softmax.headroom(largest, total)
        grows = cutlass.and_(fits, self.due(kv_tile))
        return ptx.select(grows, shift + room, lowered), ptx.select(grows, ptx.exp2(room), factor)


class Fp8Program(Fa4Program):
    """Blackwell kernel for q, k and v in fp8."""

    memory: Fp8Memory
    tile: Fp8Tile
    tile_type = Fp8Tile
    softmax_warps_type: ClassVar = Fp8SoftmaxWarps

    def softmax(self, p: PersistentParams, work: QueryTile, lanes: RowLanes, scales: list[Float32]) -> Fp8Softmax:
        log2_scale = Float32(ptx.LOG2E)
        if not self.spec.scores:
            log2_scale = self.scale(p, work, lanes)
            small = ptx.magnitude(log2_scale) < Float32(MIN_SCALE)
            log2_scale = ptx.select(small, Float32(MIN_SCALE), log2_scale)
        return Fp8Softmax(self.tile.scores_layout, [log2_scale], Fp8Exp2(self.spec.tile.polynomial))

    def scale_step(self, p: PersistentParams, work: QueryTile, lanes: RowLanes, scales: list[Float32]) -> RowScales:
        scales = [self.scale(p, work, lanes)]
        return RowScales(self.tile.scores_layout, lambda: scales)

    def scale(self, p: PersistentParams, work: QueryTile, lanes: RowLanes) -> Float32:
        """Returns the scale of the thread's row."""
        return row_scale(p, work, work.rows(p).head(lanes.row(0)))
