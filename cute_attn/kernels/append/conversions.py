"""Narrow formats, and conversions to them: one class with the architecture's instruction, one with integer arithmetic.

A conversion gets approximate quotients and returns two bounds of the code. Where they differ, `rounding` decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.runtime.arch import named

# Quotients are x * reciprocal: the factor is off by up to 2^-22 (2^-23 of rcp.approx, 2^-24 of the product that it
# inverts), the product by 2^-24 more.
MARGIN = 2.0**-20
MARGIN_UNITS = 16  # the same and more, in units of the last place of a quotient


multiply = ptx.arithmetic("mul.rn.f32")  # with subnormal numbers, and without contraction to an fma


@dataclass(frozen=True)
class Format:
    """A narrow format. `cvt`: its name in instructions that convert pairs."""

    cvt: str
    bits: int
    mantissa: int
    bias: int
    largest: float

    @property
    def shift(self) -> int:
        """Distance of a code from the same bits in fp32, whose exponent counts from another bias."""
        return 23 - self.mantissa

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def lowest_bits(self) -> int:
        """Mask of every code's lowest bit: neighbouring codes differ in it."""
        return sum(1 << self.bits * i for i in range(self.per_word))

    @property
    def magnitude_bits(self) -> int:
        return (1 << self.bits - 1) - 1

    def value(self, code: Int32) -> Float32:
        """Decodes a code without sign, subnormal ones too: fp32's subnormal numbers have the same form."""
        return multiply(ptx.from_bits(code << self.shift), Float32(2.0 ** (127 - self.bias)))

    def midpoint(self, code: Int32) -> Float32:
        """Returns the number halfway to the next code: it has one bit more."""
        half = (code << self.shift) | Int32(1 << self.shift - 1)
        return multiply(ptx.from_bits(half), Float32(2.0 ** (127 - self.bias)))


E2M1 = Format("e2m1x2", bits=4, mantissa=1, bias=1, largest=6.0)
E4M3 = Format("e4m3x2", bits=8, mantissa=3, bias=7, largest=448.0)
E5M2 = Format("e5m2x2", bits=8, mantissa=2, bias=15, largest=57344.0)
FP8 = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2}


class Conversion(Protocol):
    """Converts quotients x * reciprocal to codes."""

    @property
    def format(self) -> Format: ...

    def bounds(self, values: Sequence[Float32], reciprocal: Float32) -> tuple[Int32, Int32]:
        """Returns two words of codes with signs: at most the right ones, and at least. They differ by 1 or not."""

    def below(self, value: Float32, reciprocal: Float32) -> Int32:
        """Returns the right code or the one below, for a value >= 0. For NaN more than the code of the largest."""


@dataclass(frozen=True)
class Cvt:
    """Conversion by `cvt.rn.satfinite`, which rounds to nearest even."""

    format: Format

    def bounds(self, values: Sequence[Float32], reciprocal: Float32) -> tuple[Int32, Int32]:
        low, high = (multiply(reciprocal, Float32(factor)) for factor in (1 - MARGIN, 1 + MARGIN))
        return self._word([multiply(x, low) for x in values]), self._word([multiply(x, high) for x in values])

    def below(self, value: Float32, reciprocal: Float32) -> Int32:
        pair = 2 * self.format.bits
        text = f"{{.reg .b{pair} p; .reg .f32 z; mov.f32 z, 0f00000000; {self._cvt} p, z, $1; cvt.u32.u{pair} $0, p;}}"
        low = multiply(reciprocal, Float32(1 - MARGIN))
        return ptx.asm(text, [Int32], [multiply(value, low)], pure=True)

    def _word(self, values: Sequence[Float32]) -> Int32:
        parts = [f"p{i}" for i in range(len(values) // 2)]
        lines = [f"{self._cvt} {part}, ${2 * i + 2}, ${2 * i + 1};" for i, part in enumerate(parts)]
        names = ", ".join(parts)
        text = f"{{.reg .b{2 * self.format.bits} {names}; {' '.join(lines)} mov.b32 $0, {{{names}}};}}"
        return ptx.asm(text, [Int32], values, pure=True)

    @property
    def _cvt(self) -> str:
        return f"cvt.rn.satfinite.{self.format.cvt}.f32"


@dataclass(frozen=True)
class IntegerConversion:
    """Conversion by integer arithmetic on the bits of fp32 numbers, for any architecture."""

    format: Format

    def bounds(self, values: Sequence[Float32], reciprocal: Float32) -> tuple[Int32, Int32]:
        f = self.format
        half = 1 << f.shift - 1
        words = [Int32(0), Int32(0)]
        for i, x in enumerate(values):
            aligned = self._aligned(ptx.magnitude(multiply(x, reciprocal)))
            sign = (ptx.bits(x) >> (32 - f.bits)) & Int32(1 << f.bits - 1)
            for j, offset in enumerate((half - MARGIN_UNITS, half + MARGIN_UNITS)):
                code = ((aligned + Int32(offset)) >> f.shift) | sign
                words[j] = words[j] + code * Int32(1 << f.bits * i if f.bits * i < 31 else -(1 << 31))
        return words[0], words[1]

    def below(self, value: Float32, reciprocal: Float32) -> Int32:
        # Cut off, not rounded: codes are far from the midpoints, where the error of a quotient would matter.
        return self._aligned(multiply(value, reciprocal)) >> self.format.shift

    def _aligned(self, quotient: Float32) -> Int32:
        """Returns bits of which those from `shift` are the code, cut off at the largest number, also of NaN."""
        limited = ptx.fmin(quotient, Float32(self.format.largest))
        return ptx.bits(multiply(limited, Float32(2.0 ** (self.format.bias - 127))))


def conversion(of: Format, arch: str) -> Conversion:
    """Returns the conversion of an architecture: fp8 has an instruction from sm_90 on, e2m1 from sm_100 on."""
    first = (10, 0) if of == E2M1 else (9, 0)
    return Cvt(of) if named(arch).capability >= first else IntegerConversion(of)
