"""Sums of 8-bit products in Hopper's tensor cores, which have 14 bits, as micro-kernels recorded on an H200 show.

The 32 products and the old sum are truncated 13 bits below the highest exponent among them; the exponent of a product
is the sum of its factors'. Their sum is truncated to 14 bits too.
"""

from __future__ import annotations

import numpy as np

from cute_attn.emulator.dtypes import Array

FRACTION_BITS = 13
ZERO_EXPONENT = -60  # of a factor 0: below that of any other product, and twice it fits 8 bits


def multiply_add(a: Array, b: Array, old: Array) -> Array:
    """old + a b^T: a [m, 16, k], b [n, k], old [m, 16, n], of fp32."""
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(old).all()):
        return old + np.matmul(a, b.T)
    return np.stack(
        [_sixteen_rows(rows.T[:, :, None], b.T[:, None, :], sums) for rows, sums in zip(a, old, strict=True)]
    )


def _sixteen_rows(a: Array, b: Array, old: Array) -> Array:
    """Multiply-add for 16 rows. k is the first axis, so that numpy adds whole rows."""
    highest = np.maximum((exponents(a) + exponents(b)).max(0).astype(np.int32), _exponent_field(old) - 127)
    unit = np.ldexp(np.float32(1.0), np.maximum(highest, 2 * ZERO_EXPONENT) - FRACTION_BITS)
    products = a * b
    products /= unit
    np.trunc(products, out=products)
    return cut((products.sum(0) + np.trunc(old / unit)) * unit)


def exponents(x: Array) -> Array:
    """Exponents of decoded 8-bit numbers, none of which is subnormal in fp32."""
    return np.where(x != 0, _exponent_field(x) - 127, ZERO_EXPONENT).astype(np.int8)


def _exponent_field(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.int32) >> 23 & 0xFF


def cut(x: Array) -> Array:
    """Truncate to the leading 14 bits."""
    words = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFFFFF << (23 - FRACTION_BITS) & 0xFFFFFFFF)
    return words.view(np.float32)
