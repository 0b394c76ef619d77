"""The .approx functions, correctly rounded here. Hardware results differ within the ulp bounds of the ISA."""

from __future__ import annotations

import functools

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.ptx import Inst


def _unary(e: Emitter, inst: Inst, ftz: str, function: str) -> None:
    flush = e.bind(floats.flush, "flush") if ftz else ""
    e.compute(inst, f"{flush}({function}({flush}({{0}})))" if ftz else f"{function}({{0}})")


@form("{ex2|lg2|tanh|sqrt|sin|cos}.approx{|.ftz}.f32", conformance="approx", golden="approx")
def function_of_one(e: Emitter, inst: Inst, op: str, ftz: str) -> None:
    name = {"ex2": "np.exp2", "lg2": "np.log2"}.get(op, f"np.{op}")
    _unary(e, inst, ftz, e.bind(_sine if op == "sin" else _cosine, op) if op in ("sin", "cos") else name)


def _sine(x: Array) -> Array:
    return np.sin(x.astype(np.float64)).astype(np.float32)


def _cosine(x: Array) -> Array:
    return np.cos(x.astype(np.float64)).astype(np.float32)


@form("{rcp|rsqrt}.approx{|.ftz}.f32", conformance="approx", golden="approx")
def reciprocal(e: Emitter, inst: Inst, op: str, ftz: str) -> None:
    _unary(e, inst, ftz, e.bind(_reciprocal if op == "rcp" else _reciprocal_root, op))


def _reciprocal(x: Array) -> Array:
    return np.float32(1) / x


def _reciprocal_root(x: Array) -> Array:
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32)


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
