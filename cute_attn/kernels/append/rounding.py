"""Conversion to narrow formats: exact rounding of x / (few * scale), where `few` has at most 4 significant bits and
`scale` is any fp32 number.

A conversion, with the architecture's instruction or with integer arithmetic, gets approximate quotients and returns two
bounds of the code. Where they differ, the rounding decides.

A midpoint of neighbouring codes times `few` is exact in fp32, so that one fma has the sign of
x - midpoint * few * scale: it rounds once, and cannot underflow after `GlobalScale` has moved extreme scales.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

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


@dataclass(frozen=True)
class Conversion:
    """Converts quotients x * reciprocal to codes: by integer arithmetic on the bits of fp32 numbers, for any
    architecture.
    """

    format: Format

    def bounds(self, values: Sequence[Float32], reciprocal: Float32) -> tuple[Int32, Int32]:
        """Returns two words of codes with signs: at most the right ones, and at least. They differ by 1 or not."""
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
        """Returns the right code or the one below, for a value >= 0. For NaN more than the code of the largest."""
        # Cut off, not rounded: codes are far from the midpoints, where the error of a quotient would matter.
        return self._aligned(multiply(value, reciprocal)) >> self.format.shift

    def _aligned(self, quotient: Float32) -> Int32:
        """Returns bits of which those from `shift` are the code, cut off at the largest number, also of NaN."""
        limited = ptx.fmin(quotient, Float32(self.format.largest))
        return ptx.bits(multiply(limited, Float32(2.0 ** (self.format.bias - 127))))


@dataclass(frozen=True)
class Cvt(Conversion):
    """Conversion by `cvt.rn.satfinite`, which rounds to nearest even."""

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


def conversion(form: Format, arch: str) -> Conversion:
    """Returns the conversion of an architecture: fp8 has an instruction from sm_90 on, e2m1 from sm_100 on."""
    first = (10, 0) if form == E2M1 else (9, 0)
    return Cvt(form) if named(arch).capability >= first else Conversion(form)


# --- rounding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GlobalScale:
    """A global scale times a power of two, which values have to be multiplied by, too."""

    value: Float32
    power: Float32


@cute.jit
def global_scale(number: Float32, address: Int64) -> GlobalScale:
    """Returns the scale at `address`, or `number` if that is 0. The power is 1 for scales from 2^-64 to 2^64."""
    scale = number
    if address != Int64(0):
        scale = ptx.ld_global_f32(address)
    exponent = (ptx.bits(scale) >> 23) & Int32(255)
    ordinary = cutlass.and_(exponent > Int32(127 - 64), exponent < Int32(127 + 64))
    moved = ptx.from_bits(ptx.minimum(Int32(255) - exponent, Int32(254)) << 23)
    power = ptx.select(ordinary, Float32(1.0), moved)
    return GlobalScale(multiply(scale, power), power)


@cute.jit
def scaled(values: list[Float32], power: Float32) -> list[Float32]:
    """Multiplies by a power of two. What overflows is beyond the largest code, what underflows rounds to 0."""
    if power != Float32(1.0):
        values = [multiply(x, power) for x in values]
    return values


@dataclass(frozen=True)
class Denominator:
    """few * scale, and about its reciprocal (0: all quotients are 0)."""

    few: Float32
    scale: Float32
    reciprocal: Float32


def denominator(few: Float32, scale: Float32) -> Denominator:
    return Denominator(few, scale, ptx.reciprocal(multiply(few, scale)))


def above_midpoint(form: Format, x: Float32, code: Int32, by: Denominator) -> Int32:
    """Returns 1 if x >= 0 rounds to more than `code`, else 0. In a tie the even code wins."""
    midpoint = multiply(form.midpoint(code), -by.few)
    difference = ptx.bits(ptx.fma(midpoint, by.scale, x))
    return ptx.select(difference + (code & Int32(1)) > Int32(0), Int32(1), Int32(0))


def nearest(conversion: Conversion, x: Float32, by: Denominator) -> Int32:
    """Returns the code nearest to the quotient of x >= 0; that of the largest number for NaN."""
    code = conversion.below(x, by.reciprocal)
    largest = Int32(conversion.format.magnitude_bits - 1)  # e4m3: the last code is NaN
    return ptx.minimum(code + above_midpoint(conversion.format, x, code, by), largest)


Magnitudes = Callable[[Int32], Float32]  # of elements, which are loaded from memory, by index


def codes(conversion: Conversion, values: list[Float32], magnitudes: Magnitudes, by: Denominator) -> list[Int32]:
    """Returns words of the codes nearest to the quotients of values, whose `magnitudes` memory has."""
    size = conversion.format.per_word
    words = []
    for first in range(0, len(values), size):
        low, high = conversion.bounds(values[first : first + size], by.reciprocal)
        words.append(decided(conversion.format, low, high, magnitudes, first, by))
    return words


@cute.jit
def decided(
    form: cutlass.Constexpr,
    low: Int32,
    high: Int32,
    magnitudes: cutlass.Constexpr,
    first: cutlass.Constexpr,
    by: Denominator,
) -> Int32:
    """Decides where two bounds differ. These elements are rare: they are loaded again rather than kept by number."""
    words = low
    open_ = (low ^ high) & Int32(form.lowest_bits)
    while open_ != Int32(0):
        lowest = open_ & -open_
        bit = ptx.asm("bfind.u32 $0, $1;", [Int32], [lowest], pure=True)
        code = (low >> bit) & Int32(form.magnitude_bits)
        x = magnitudes(first + bit // form.bits)
        words = words + (above_midpoint(form, x, code, by) << bit)
        open_ = open_ ^ lowest
    return words
