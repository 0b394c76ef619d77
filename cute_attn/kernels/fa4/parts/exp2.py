"""exp2 of pairs of scores: on the MUFU, or for some pairs by a polynomial on the FMA units."""

from dataclasses import dataclass

from cutlass import Float32, Int64

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.ptx import asm
from cute_attn.kernels.blocks.softmax import tree

GROUP = 16  # pairs, of which some are computed by the polynomial
LOWEST, HIGHEST = -127.0, 126.0  # below, the result is as good as 0; above, it exceeds every limit of a sum


@dataclass(frozen=True)
class PairExp2:
    """exp2 with pairs of registers; `polynomial`: of every 16 pairs, those on the FMA units."""

    polynomial: int

    def exponentials(self, s: list[Float32], scale: Float32, shift: Float32) -> list[Float32]:
        scales, shifts, p = sm100.pair(scale, scale), sm100.pair(shift, shift), []
        for i in range(0, len(s), 2):
            x = sm100.fma_pair(sm100.pair(s[i], s[i + 1]), scales, shifts)
            p += self.polynomial_pair(x) if self.on_fma_units(i // 2) else [ptx.exp2(half) for half in sm100.halves(x)]
        return p

    def sum(self, p: list[Float32]) -> Float32:
        low, high = sm100.halves(tree(sm100.add_pair, [sm100.pair(p[i], p[i + 1]) for i in range(0, len(p), 2)]))
        return low + high

    def on_fma_units(self, pair: int) -> bool:
        """Whether a pair is computed by the polynomial: spread evenly, so that both units are busy at once."""
        return (pair + 1) * self.polynomial // GROUP > pair * self.polynomial // GROUP

    def polynomial_pair(self, x: Int64) -> list[Float32]:
        low, high = (ptx.fmin(ptx.fmax(half, Float32(LOWEST)), Float32(HIGHEST)) for half in sm100.halves(x))
        return sm100.halves(exp2_polynomial(sm100.pair(low, high)))


def exp2_polynomial(x: Int64) -> Int64:
    """Computes exp2 of a pair in [-127, 127): 2^x = 2^n 2^f with n = floor(x); 2^f by a cubic with a relative error of
    9e-5 (minimax over [0, 1), with 2^0 exact), below the rounding of bf16. n is added to the exponent field.
    """
    text = (
        "{.reg .b64 m, t, f, r, c; .reg .b32 a, b, i, j;"
        "mov.b64 m, 0x4b4000004b400000;"  # 2^23 + 2^22: adding it leaves floor(x) in the low bits
        "add.rm.ftz.f32x2 t, $1, m; sub.rn.ftz.f32x2 f, t, m; sub.rn.ftz.f32x2 f, $1, f;"
        "mov.b64 r, 0x3d9df09d3d9df09d; mov.b64 c, 0x3e6906a43e6906a4; fma.rn.ftz.f32x2 r, r, f, c;"
        "mov.b64 c, 0x3f31f5193f31f519; fma.rn.ftz.f32x2 r, r, f, c;"
        "mov.b64 c, 0x3f8000003f800000; fma.rn.ftz.f32x2 r, r, f, c;"
        "mov.b64 {i, j}, t; shl.b32 i, i, 23; shl.b32 j, j, 23; mov.b64 {a, b}, r;"
        "add.s32 a, a, i; add.s32 b, b, j; mov.b64 $0, {a, b};}"
    )
    return asm(text, [Int64], [x], pure=True)
