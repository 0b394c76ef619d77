"""Formats of matrices: 16-bit floats, and tables of fp8 and fp4, which are decoded by look-up and encoded to nearest
with ties to even."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.isa import floats

# exponent bits, mantissa bits, bias, has infinities
_LAYOUT = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}


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
    return np.where(negative, -magnitude, magnitude).astype(np.float32)


VALUES = {kind: _values(kind) for kind in _LAYOUT}


def decode(codes: Array, kind: str) -> Array:
    """Decode codes (any integer array) to float32."""
    return VALUES[kind][codes]


Decode = Callable[[Array], Array]
DECODERS: dict[str, Decode] = {
    "f16": lambda words: words.view(np.float16).astype(np.float32),
    "bf16": lambda words: floats.bf16_to_f32(words.view(np.uint16)),
    "e4m3": lambda words: decode(words.view(np.uint8), "e4m3"),
    "e5m2": lambda words: decode(words.view(np.uint8), "e5m2"),
}
"""From words that hold numbers of a type to float32."""


def encode(x: Array, kind: str) -> Array:
    """Encode float32: to nearest, ties to even, saturated to the largest finite value; NaN as on hardware."""
    half = len(VALUES[kind]) // 2
    positive = VALUES[kind][:half]
    levels = positive[np.isfinite(positive)].astype(np.float64)
    size = np.minimum(np.abs(x).astype(np.float64), levels[-1])
    size = np.where(np.isnan(size), 0.0, size)
    above = np.clip(np.searchsorted(levels, size, side="left"), 1, len(levels) - 1)
    share = (size - levels[above - 1]) / (levels[above] - levels[above - 1])
    code = np.where((share > 0.5) | ((share == 0.5) & (above % 2 == 0)), above, above - 1)
    code = code | np.where(np.signbit(x), half, 0)
    nan = {"e4m3": 0x7F, "e5m2": 0x7F}.get(kind, half - 1)  # formats without NaN take the largest value
    return np.where(np.isnan(x), nan, code).astype(np.uint8)
