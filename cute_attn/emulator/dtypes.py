"""PTX types as numpy types. The `home` of a register is the numpy type that holds its bits."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    **{name: np.dtype(name) for name in ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")},
    "p": np.dtype(np.bool_),
    "v16": np.dtype("V16"),
}

# Packed, 8-bit and brain floats have no numpy type: they travel as bits.
_AS_BITS = {"bf16": "u2", "f16x2": "u4", "bf16x2": "u4", "f32x2": "u8", "b128": "v16", "pred": "p"}
OF_PTX = {f"{letter}{8 * int(t[1:])}": t for t in DTYPES for letter in {"u": "bu", "i": "s", "f": "f"}.get(t[0], "")}
OF_PTX |= {"e4m3": "u1", "e5m2": "u1", **_AS_BITS}

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
