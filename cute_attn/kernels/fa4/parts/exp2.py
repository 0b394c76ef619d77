"""exp2 of pairs of scores: on the MUFU, or for some pairs by a polynomial on the FMA units."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cutlass import Float32, Int64

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.ptx import asm
from cute_attn.kernels.blocks.softmax import Exp2, tree

GROUP = 16  # pairs, of which some are computed by the polynomial
MASKED_POLYNOMIAL = 4  # of a masked tile, at most: a mask takes some 80 issue slots of what they need
LOWEST, HIGHEST = -127, 127  # exponents that the polynomial saturates to: 0, and more than every limit of a sum
RANGE = HIGHEST - LOWEST


class PairSums(NamedTuple):
    """Sum of a row's exponentials, of even and of odd columns, and the largest of the scores on the FMA units."""

    pairs: Int64
    high: Float32


@dataclass(frozen=True)
class PairExp2(Exp2):
    """exp2 with pairs of registers; `polynomial`: of every 16 pairs, those on the FMA units."""

    polynomial: int

    def beside_masks(self) -> "PairExp2":
        """Returns the strategy of masked tiles."""
        return replace(self, polynomial=min(self.polynomial, MASKED_POLYNOMIAL))

    def exponentials(self, s: list[Float32], scale: Float32, shift: Float32) -> list[Float32]:
        scales, shifts, p = sm100.pair(scale, scale), sm100.pair(shift, shift), []
        for i in range(0, len(s), 2):
            if self.on_fma_units(i // 2):
                p += saturated_exp2(s[i : i + 2], scale, shift)
            else:
                x = sm100.fma_pair(sm100.pair(s[i], s[i + 1]), scales, shifts)
                p += [ptx.exp2(half) for half in sm100.halves(x)]
        return p

    def zero_sums(self) -> PairSums:
        zero = Float32(0.0)
        return PairSums(sm100.pair(zero, zero), zero)

    def add(self, sums: PairSums, s: list[Float32], p: list[Float32]) -> PairSums:
        """Adds the exponentials `p` of scores `s`."""
        pairs = [sm100.pair(p[i], p[i + 1]) for i in range(0, len(p), 2)]
        return PairSums(tree(sm100.add_pair, [sums.pairs, *pairs]), self.largest_score(sums.high, s))

    def largest_score(self, high: Float32, s: list[Float32]) -> Float32:
        """Returns the largest of `high` and the scores on the FMA units."""
        for i in range(0, len(s), 2):
            if self.on_fma_units(i // 2):
                high = ptx.fmax_nan(high, s[i], s[i + 1])
        return high

    def sum(self, sums: PairSums) -> Float32:  # type: ignore[override]
        """Returns the sum: NaN if a score is, which saturation makes 0 on the FMA units."""
        low, high = sm100.halves(sums.pairs)
        return ptx.fma(sums.high, Float32(0.0), low + high) if self.polynomial else low + high

    def on_fma_units(self, pair: int) -> bool:
        """Whether a pair is computed by the polynomial: spread evenly, so that both units are busy at once."""
        return (pair + 1) * self.polynomial // GROUP > pair * self.polynomial // GROUP


def saturated_exp2(s: list[Float32], scale: Float32, shift: Float32) -> list[Float32]:
    """Computes exp2(s * scale + shift) of a pair, saturated to [0, 2^127]; NaN yields 0.

    The FMA that computes the exponent maps [LOWEST, HIGHEST] to [0, 1], so that its saturation clamps for free; the
    exponent's rounding error is then 2^-18 at most.
    """
    scale = scale * Float32(1.0 / RANGE)
    shift = ptx.fma(shift, Float32(1.0 / RANGE), Float32(-LOWEST / RANGE))
    low, high = (asm("fma.rn.ftz.sat.f32 $0, $1, $2, $3;", [Float32], [x, scale, shift], pure=True) for x in s)
    return sm100.halves(exp2_polynomial(sm100.pair(low, high)))


def exp2_polynomial(x: Int64) -> Int64:
    """Computes 2^(254 x - 127) of a pair in [0, 1], 0 of 0: 2^n 2^f with n the exponent rounded to nearest; 2^f by a
    cubic with a relative error of 1.02e-4 (minimax over [-1/2, 1/2], with 2^0 exact), below the rounding of fp16. n is
    added to the exponent field.
    """
    text = (
        "{.reg .b64 k, m, t, f, r, c; .reg .b32 a, b, i, j;"
        "mov.b64 k, 0x437e0000437e0000;"  # 254
        "mov.b64 m, 0x4b3fff814b3fff81;"  # 2^23 + 2^22 - 127: adding it leaves n in the low bits
        "fma.rn.ftz.f32x2 t, $1, k, m; sub.rn.ftz.f32x2 f, m, t; fma.rn.ftz.f32x2 f, $1, k, f;"
        "mov.b64 r, 0x3d6151113d615111; mov.b64 c, 0x3e78062a3e78062a; fma.rn.ftz.f32x2 r, r, f, c;"
        "mov.b64 c, 0x3f317afd3f317afd; fma.rn.ftz.f32x2 r, r, f, c;"
        "mov.b64 c, 0x3f8000003f800000; fma.rn.ftz.f32x2 r, r, f, c;"
        "mov.b64 {i, j}, t; shl.b32 i, i, 23; shl.b32 j, j, 23; mov.b64 {a, b}, r;"
        "add.s32 a, a, i; add.s32 b, b, j; mov.b64 $0, {a, b};}"
    )
    return asm(text, [Int64], [x], pure=True)
