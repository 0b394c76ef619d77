"""Tables of fp8, fp6 and fp4 formats: decoding by look-up, encoding to nearest with ties to even, or stochastically."""

from __future__ import annotations

import numpy as np

from cute_attn.emulator.dtypes import Array

# exponent bits, mantissa bits, bias, has infinities
_LAYOUT = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3)}


def _values(kind: str) -> Array:
    """Value of every code."""
    exponent_bits, mantissa_bits, bias = _LAYOUT[kind]
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    magnitude = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    top = (1 << exponent_bits) - 1
    if kind == "e4m3":
        magnitude = np.where((exponent == top) & (mantissa == 7), np.nan, magnitude)
    elif kind == "e5m2":
        magnitude = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), magnitude)
    negative = codes >> (exponent_bits + mantissa_bits) == 1
    found: Array = np.where(negative, -magnitude, magnitude).astype(np.float32)
    return found


VALUES = {kind: _values(kind) for kind in _LAYOUT}


def decode(codes: Array, kind: str) -> Array:
    """Decode codes (any integer array) to float32."""
    found: Array = VALUES[kind][codes]
    return found


def encode(x: Array, kind: str, relu: bool = False) -> Array:
    """Encode float32: to nearest, ties to even, saturated to the largest finite value; NaN as on hardware."""
    above, share = _neighbours(x, kind)
    return _coded(x, kind, relu, above, (share > 0.5) | ((share == 0.5) & (above % 2 == 0)))


def encode_stochastic(x: Array, kind: str, relu: bool, random: Array, bits: int) -> Array:
    """Encode float32: away from zero where the discarded part and a random number of `bits` bits, its most significant
    one beside the discarded part's, carry. Saturated as `encode` does."""
    above, share = _neighbours(x, kind)
    return _coded(x, kind, relu, above, share + random.astype(np.float64) / (1 << bits) >= 1)


def _neighbours(x: Array, kind: str) -> tuple[Array, Array]:
    """Code of the next level of equal or larger size, saturated, and how far x has come to it from the one below."""
    positive = VALUES[kind][: len(VALUES[kind]) // 2]
    finite = int(np.isfinite(positive).sum())
    levels = positive[:finite].astype(np.float64)
    size = np.minimum(np.abs(x).astype(np.float64), levels[-1])
    size = np.where(np.isnan(size), 0.0, size)
    above = np.clip(np.searchsorted(levels, size, side="left"), 1, finite - 1)
    return above, (size - levels[above - 1]) / (levels[above] - levels[above - 1])


def _coded(x: Array, kind: str, relu: bool, above: Array, away: Array) -> Array:
    half = len(VALUES[kind]) // 2
    code = np.where(away, above, above - 1)
    code = np.where(x < 0, 0, code) if relu else code | np.where(np.signbit(x), half, 0)
    nan = {"e4m3": 0x7F, "e5m2": 0x7F}.get(kind, half - 1)  # formats without NaN take the largest value
    result: Array = np.where(np.isnan(x), nan, code).astype(np.uint8)
    return result


def decode_scale(codes: Array) -> Array:
    """Decode ue8m0, a power of two; 0xFF is NaN."""
    exponents = codes.astype(np.int32)
    found: Array = np.where(exponents == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents - 127))
    return found.astype(np.float32)


def encode_scale(x: Array, up: bool) -> Array:
    """Encode float32 as ue8m0, rounded towards zero or up."""
    mantissa, exponent = np.frexp(np.abs(x).astype(np.float64))
    power = exponent - 1 + (1 if up else 0) * (mantissa != 0.5)
    code = np.clip(power + 127, 0, 254)
    code = np.where(x == 0, 0, code)
    result: Array = np.where(np.isnan(x), 255, code).astype(np.uint8)
    return result
