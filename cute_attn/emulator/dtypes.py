"""PTX types as numpy types. The `home` of a register is the numpy type that holds its bits."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "u1": np.dtype(np.uint8),
    "i1": np.dtype(np.int8),
    "u2": np.dtype(np.uint16),
    "i2": np.dtype(np.int16),
    "f2": np.dtype(np.float16),
    "u4": np.dtype(np.uint32),
    "i4": np.dtype(np.int32),
    "f4": np.dtype(np.float32),
    "u8": np.dtype(np.uint64),
    "i8": np.dtype(np.int64),
    "f8": np.dtype(np.float64),
    "p": np.dtype(np.bool_),
    "v16": np.dtype("V16"),
}

# Packed and 16-bit brain floats have no numpy type: they travel as bits.
OF_PTX = {
    "b8": "u1",
    "u8": "u1",
    "s8": "i1",
    "e4m3": "u1",
    "e5m2": "u1",
    "b16": "u2",
    "u16": "u2",
    "s16": "i2",
    "f16": "f2",
    "bf16": "u2",
    "b32": "u4",
    "u32": "u4",
    "s32": "i4",
    "f32": "f4",
    "tf32": "u4",
    "f16x2": "u4",
    "bf16x2": "u4",
    "b128": "v16",
    "b64": "u8",
    "u64": "u8",
    "s64": "i8",
    "f64": "f8",
    "f32x2": "u8",
    "pred": "p",
}

some = np.count_nonzero
"""How many flags are set: a fifth of the time that `any` takes."""

WIDTH = {"p": 0, **{tag: int(tag[1:]) for tag in DTYPES if tag != "p"}}
"""Bytes of a tag; a predicate has none."""


def tag(ptx_type: str) -> str:
    return OF_PTX[ptx_type.lstrip(".")]


def bits_to(value: int, to: str) -> Array:
    """One-element array of type `to` whose bits are the low bits of `value`."""
    if to == "p":
        return np.array([bool(value)])
    width = WIDTH[to]
    raw = np.array([value & ((1 << (8 * width)) - 1)], f"u{width}")
    return raw.view(DTYPES[to])
