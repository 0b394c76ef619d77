"""Float arithmetic with the rounding of PTX, where numpy would round twice or differently."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from cute_attn.emulator.dtypes import Array, some

_SMALLEST_NORMAL = np.float32(2.0**-126)
_ZERO = np.float32(0)
_LOW = np.int64((1 << 29) - 1)  # bits of a double beyond a float
_HALF = np.int64(1 << 28)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float32, rounded once, to nearest."""
    product = a.astype(np.float64) * b  # exact: 48 bits
    addend = c.astype(np.float64)
    total = product + addend
    if some((total.view(np.int64) & _LOW) == _HALF) or _has_subnormals(total):
        total = _to_odd(total, product, addend)
    return total.astype(np.float32)


def _to_odd(total: Array, x: Array, y: Array) -> Array:
    """Convert `total` = x + y from round-to-nearest to round-to-odd, so that a second rounding is correct."""
    error = _error(total, x, y)
    bits = total.view(np.int64)
    even = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    outward = (error > 0) == (total > 0)
    return np.where(even, bits + np.where(outward, 1, -1), bits).view(np.float64)


def add32_down(a: Array, b: Array) -> Array:
    """a + b in float32, rounded down."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    exact = x + y
    near = exact.astype(np.float32)
    over = (near > exact) | ((near == exact) & (_error(exact, x, y) < 0))
    found = np.where(over & np.isfinite(exact), np.nextafter(near, np.float32(-np.inf)), near)
    # Exact zeros of numbers with opposite signs are -0.
    return np.where((found == 0) & (np.signbit(a) != np.signbit(b)), np.float32(-0.0), found)


def sub32_down(a: Array, b: Array) -> Array:
    return add32_down(a, -b)


def _error(total: Array, x: Array, y: Array) -> Array:
    """What `total` = x + y has lost."""
    part = total - x
    return (x - (total - part)) + (y - part)


def flush(x: Array) -> Array:
    """Flush subnormals to zeros of their sign."""
    if not _has_subnormals(x):
        return x
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(_ZERO, x), x)


def _has_subnormals(x: Array) -> bool:
    """Whether any item is one of float32: zeros, which are many, are small too."""
    small = some(np.abs(x) < _SMALLEST_NORMAL)
    return bool(small) and bool(small + some(x) > x.size)


def _extreme(function: Callable[[Array, Array], Array], low: bool, a: Array, b: Array, *more: Array) -> Array:
    """Min (`low`) or max by a function of numpy, with +0 above -0, which numpy does not distinguish."""
    found, zeros = function(a, b), (a == 0) & (b == 0)
    if some(zeros):
        found = np.where(zeros, np.where(np.signbit(a) != low, b, a), found)
    return _extreme(function, low, found, *more) if more else found  # three operands from sm_100 on


EXTREMES = {
    "min": functools.partial(_extreme, np.fmin, True),  # the other operand where one is NaN
    "max": functools.partial(_extreme, np.fmax, False),
    "min.NaN": functools.partial(_extreme, np.minimum, True),  # NaN where one is NaN
    "max.NaN": functools.partial(_extreme, np.maximum, False),
}
"""PTX min and max of floats."""


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """Convert to bits of bfloat16; NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    found: Array = (bits >> np.uint32(16)).astype(np.uint16)
    missing = np.isnan(x)
    return np.where(missing, np.uint16(0x7FFF), found) if some(missing) else found


def f32_to_f16(x: Array) -> Array:
    """Convert to float16; NaN becomes 0x7FFF."""
    half = np.asarray(x, np.float32).astype(np.float16)
    missing = np.isnan(half)
    return np.where(missing, np.array([0x7FFF], np.uint16).view(np.float16), half) if some(missing) else half


def interleaved(*parts: Array) -> Array:
    """Items of arrays by turns; one item stands for as many as the other arrays have."""
    rows = np.empty((max(map(len, parts)), len(parts)), parts[0].dtype)
    for i, part in enumerate(parts):
        rows[:, i] = part
    return rows.ravel()


def halves(x: Array, kind: str) -> Array:
    """Unpack words [n] of `kind` ".f16x2", ".bf16x2" or ".f32x2" to float32 [n, 2]."""
    if kind == ".f32x2":
        return np.ascontiguousarray(x).view(np.float32).reshape(-1, 2)
    raw = np.ascontiguousarray(x).view(np.uint16).reshape(-1, 2)
    return raw.view(np.float16).astype(np.float32) if kind == ".f16x2" else bf16_to_f32(raw)


def packed(x: Array, kind: str) -> Array:
    """Round float32 to half of the bits of `kind` and pack neighbours into its words."""
    if kind == ".f32x2":
        return np.ascontiguousarray(x, np.float32).reshape(-1).view(np.uint64)
    narrow = f32_to_f16(x) if kind == ".f16x2" else f32_to_bf16(x)
    return np.ascontiguousarray(narrow).reshape(-1).view(np.uint32)
