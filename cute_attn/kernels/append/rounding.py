"""Exact rounding of x / (few * scale), where `few` has at most 4 significant bits and `scale` is any fp32 number.

A midpoint of neighbouring codes times `few` is exact in fp32, so that one fma has the sign of
x - midpoint * few * scale: it rounds once, and cannot underflow after `GlobalScale` has moved extreme scales.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.append.conversions import Conversion, Format, multiply
from cute_attn.kernels.append.memory import Elements
from cute_attn.kernels.blocks import ptx


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
class Divisor:
    """few * scale, and about its reciprocal (0: all quotients are 0)."""

    few: Float32
    scale: Float32
    reciprocal: Float32


def divisor(few: Float32, scale: Float32) -> Divisor:
    return Divisor(few, scale, ptx.reciprocal(multiply(few, scale)))


def above_midpoint(of: Format, x: Float32, code: Int32, by: Divisor) -> Int32:
    """Returns 1 if x >= 0 rounds to more than `code`, else 0. In a tie the even code wins."""
    midpoint = multiply(of.midpoint(code), -by.few)
    difference = ptx.bits(ptx.fma(midpoint, by.scale, x))
    return ptx.select(difference + (code & Int32(1)) > Int32(0), Int32(1), Int32(0))


def nearest(conversion: Conversion, x: Float32, by: Divisor) -> Int32:
    """Returns the code nearest to the quotient of x >= 0; that of the largest number for NaN."""
    code = conversion.below(x, by.reciprocal)
    largest = Int32(conversion.format.magnitude_bits - 1)  # e4m3: the last code is NaN
    return ptx.minimum(code + above_midpoint(conversion.format, x, code, by), largest)


@dataclass(frozen=True)
class Block:
    """16 elements in memory, multiplied by `power` when they are loaded."""

    elements: Elements
    address: Int64
    power: Float32

    def magnitude(self, index: Int32) -> Float32:
        return ptx.magnitude(multiply(self.elements.at(self.address, index), self.power))


def codes(conversion: Conversion, values: list[Float32], block: Block, by: Divisor) -> list[Int32]:
    """Returns words of the codes nearest to the quotients of a block's values."""
    size = conversion.format.per_word
    words = []
    for first in range(0, len(values), size):
        low, high = conversion.bounds(values[first : first + size], by.reciprocal)
        words.append(decided(conversion.format, low, high, block, first, by))
    return words


@cute.jit
def decided(
    of: cutlass.Constexpr, low: Int32, high: Int32, block: Block, first: cutlass.Constexpr, by: Divisor
) -> Int32:
    """Decides where two bounds differ. These elements are rare: they are loaded again rather than kept by number."""
    words = low
    open_ = (low ^ high) & Int32(of.lowest_bits)
    while open_ != Int32(0):
        lowest = open_ & -open_
        bit = ptx.asm("bfind.u32 $0, $1;", [Int32], [lowest], pure=True)
        code = (low >> bit) & Int32(of.magnitude_bits)
        x = block.magnitude(first + bit // of.bits)
        words = words + (above_midpoint(of, x, code, by) << bit)
        open_ = open_ ^ lowest
    return words
