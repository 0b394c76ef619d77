"""The .approx functions, correctly rounded here. Hardware results differ within the ulp bounds of the ISA."""

from __future__ import annotations

import functools

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.ptx import Inst

_PATTERNS = {
    "ex2": "np.exp2({0})",
    "lg2": "np.log2({0})",
    "tanh": "np.tanh({0})",
    "sqrt": "np.sqrt({0})",
    "sin": "np.sin({0}.astype(f8)).astype(f4)",
    "cos": "np.cos({0}.astype(f8)).astype(f4)",
    "rcp": "f4.type(1) / {0}",
    "rsqrt": "(1.0 / np.sqrt({0}.astype(f8))).astype(f4)",
}


@form("{ex2|lg2|tanh|sqrt|sin|cos|rcp|rsqrt}.approx{|.ftz}.f32", conformance="approx", golden="approx")
def function_of_one(e: Emitter, inst: Inst, op: str, ftz: str) -> None:
    pattern = _PATTERNS[op]
    if ftz:
        flush = e.bind(floats.flush, "flush")
        pattern = f"{flush}({pattern.format(f'{flush}({{0}})')})"
    e.compute(inst, pattern)


@form("div{.approx|.full}{|.ftz}.f32", conformance="approx", golden="approx")
def divide(e: Emitter, inst: Inst, mode: str, ftz: str) -> None:
    e.compute(inst, f"{e.bind(floats.flush, 'flush')}({{0}} / {{1}})" if ftz else "{0} / {1}")


@form(
    "{ex2|tanh}.approx{.f16x2}",
    "{ex2}.approx.ftz{.bf16x2}",
    "{tanh}.approx{.bf16x2}",
    conformance="approx",
)
def function_of_two(e: Emitter, inst: Inst, op: str, kind: str) -> None:
    e.compute(inst, functools.partial(_pairwise, op, kind))


def _pairwise(op: str, kind: str, x: Array) -> Array:
    function = np.exp2 if op == "ex2" else np.tanh
    return floats.packed(function(floats.halves(x, kind)), kind)
