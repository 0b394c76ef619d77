"""Arithmetic on pairs of float32 in 64-bit registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.ptx import Inst

_ROUND = "{|.rn|.rz|.rm|.rp}"


@form(f"{{add|sub|mul}}{_ROUND}{{|.ftz}}.f32x2", since=100, conformance="unverified")
def arithmetic(e: Emitter, inst: Inst, op: str, mode: str, ftz: str) -> None:
    _pairwise(e, inst, _OPERATIONS[op], mode, ftz)


@form("fma{.rn|.rz|.rm|.rp}{|.ftz}.f32x2", since=100, conformance="unverified")
def fma(e: Emitter, inst: Inst, mode: str, ftz: str) -> None:
    if mode != ".rn":
        raise PtxError(f"{inst.op}: only .rn is supported")
    _pairwise(e, inst, lambda a, b, c, mode: floats.fma32(a, b, c), mode, ftz)


def _pairwise(e: Emitter, inst: Inst, function: Callable[..., Array], mode: str, ftz: str) -> None:
    rounding = mode[1:] or "rn"

    def pairwise(*pairs: Array) -> Array:
        rows = np.empty((len(pairs), max(map(len, pairs))), np.uint64)
        for row, pair in zip(rows, pairs, strict=True):
            row[:] = pair
        singles = rows.view(np.float32)
        found = function(*(floats.flush(singles) if ftz else singles), rounding)
        result = floats.flush(found) if ftz else found
        return np.ascontiguousarray(result, np.float32).view(np.uint64)

    e.compute(inst, pairwise)


def _add(a: Array, b: Array, mode: str) -> Array:
    return floats.add32(a, b, mode)


def _subtract(a: Array, b: Array, mode: str) -> Array:
    return floats.add32(a, -b, mode)


def _multiply(a: Array, b: Array, mode: str) -> Array:
    if mode == "rn":
        return a * b
    exact = a.astype(np.float64) * b
    return floats.directed(exact, np.zeros_like(exact), mode)


_OPERATIONS = {"add": _add, "sub": _subtract, "mul": _multiply}
