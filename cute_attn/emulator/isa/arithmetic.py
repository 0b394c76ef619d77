"""add, sub, mul, mad, fma, min, max, div, rem, neg, abs, setp, selp: integers, floats and packed pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product

import numpy as np

from cute_attn.emulator.dtypes import Array, tag
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import computed, form
from cute_attn.emulator.ptx import Inst

_WIDER = {"u2": "u4", "i2": "i4", "u4": "u8", "i4": "i8"}
_SIGN = {"add": "+", "sub": "-", "mul": "*"}
_INTS, _SIGNED, _FLOATS = "{.u16|.s16|.u32|.s32|.u64|.s64}", "{.s16|.s32|.s64}", "{.f32|.f64}"


# --- integers ---------------------------------------------------------------------------------------------------------


@form("{mul|mad}.wide{.u16|.s16|.u32|.s32}")
def wide(e: Emitter, inst: Inst, op: str, kind: str) -> None:
    wide = _WIDER[tag(kind)]
    product = f"{{0}}.astype({wide}) * {{1}}"
    e.compute(inst, *((product, ". .", wide) if op == "mul" else (f"{product} + {{2}}", f". . {wide}", wide)))


@form("mul.hi{.u16|.s16}")
@form("{mul|mad}.hi{.u32|.s32}")
def high(e: Emitter, inst: Inst, *choices: str) -> None:
    kind = choices[-1]
    wide = _WIDER[tag(kind)]
    product = f"(({{0}}.astype({wide}) * {{1}}) >> {e.constant(int(kind[2:]), wide)}).astype({{to}})"
    e.compute(inst, f"{product} + {{2}}" if "mad" in choices else product)


def _quotient(a: Array, b: Array) -> Array:
    """Divide with truncation. Division by zero gives all ones, as observed on hardware."""
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, a - _quotient(a, b) * b).astype(a.dtype)


computed(
    {
        f"add{_INTS}": "{0} + {1}",
        f"sub{_INTS}": "{0} - {1}",
        f"mul.lo{_INTS}": "{0} * {1}",
        f"mad.lo{_INTS}": "{0} * {1} + {2}",
        f"min{_INTS}": "np.minimum({0}, {1})",
        f"max{_INTS}": "np.maximum({0}, {1})",
        f"neg{_SIGNED}": "-{0}",
        f"abs{_SIGNED}": "np.abs({0})",
        f"div{_INTS}": _quotient,
        f"rem{_INTS}": _remainder,
    }
)
computed({f"{op}.relu.s32": f"np.maximum(np.{op}imum({{0}}, {{1}}), i4.type(0))" for op in ("min", "max")}, since=90)


# --- floats -----------------------------------------------------------------------------------------------------------

_PACKED = "{.f16x2|.bf16x2}"


def _flushed(e: Emitter, ftz: bool, text: str) -> str:
    return f"{e.bind(floats.flush, 'flush')}({text})" if ftz else text


def _modified(e: Emitter, inst: Inst, function: str | Callable[..., Array]) -> None:
    """Compute a function of floats with the modifiers of its opcode: .ftz is for operands and result. Packed 16-bit
    floats are computed in float32, then rounded: to round twice is harmless, as 24 bits are at least 2 * 11 + 2.
    """
    d, *sources = inst.operands
    modifiers = inst.op.split(".")
    kind, ftz = modifiers[-1], "ftz" in modifiers
    values = [e.get(x, tag(kind)) for x in sources]
    if packed := kind in ("f16x2", "bf16x2", "f32x2"):
        values = [f"{e.bind(floats.halves, 'halves')}({value}, '.{kind}')" for value in values]
    text = _flushed(e, ftz, e.expression(inst, function, [_flushed(e, ftz, value) for value in values]))
    if "sat" in modifiers:
        text = f"{e.bind(_saturate, 'saturate')}({text})"
    e.set(d, tag(kind), f"{e.bind(floats.packed, 'packed')}({text}, '.{kind}')" if packed else text)


_floats = functools.partial(computed, compute=_modified)


def _saturate(x: Array) -> Array:
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))  # NaN and -0 become +0


def _fma_half(a: Array, b: Array, c: Array) -> Array:
    """Compute in float64 and round to odd in float32, so that only the final rounding to 16 bits decides."""
    x, y = a.astype(np.float64) * b, c.astype(np.float64)
    total = floats._to_odd(x + y, x, y)
    near = total.astype(np.float32)
    bits = near.view(np.int32)
    inexact = (near.astype(np.float64) != total) & ((bits & 1) == 0)
    outward = np.abs(total) > np.abs(near.astype(np.float64))
    return np.where(inexact, bits + np.where(outward, 1, -1), bits).astype(np.int32).view(np.float32)


_ROUNDED: dict[str, str | Callable[..., Array]] = {
    "add.rm": floats.add32_down,
    "sub.rm": floats.sub32_down,
    "fma.rn": floats.fma32,
}
_SUMS = "{|.rn}{|.ftz}{|.sat}.f32", "{|.rn}{.f64|.f16x2|.bf16x2}"
_NANS = [*product(("min", "max"), ("", ".NaN"))]
_floats(
    {f"{op}{kinds}": f"{{0}} {sign} {{1}}" for op, sign in _SIGN.items() for kinds in _SUMS}
    | {f"{op}{{|.ftz}}{{|.sat}}.f32": function for op, function in _ROUNDED.items()}
    | {f"{op}{{|.ftz}}{nan}.f32": floats.EXTREMES[op + nan] for op, nan in _NANS}
    | {f"{op}{nan}{_PACKED}": floats.EXTREMES[op + nan] for op, nan in _NANS}
    | {f"{op}.f64": floats.EXTREMES[op] for op in ("min", "max")}
    | {
        f"fma.rn{_PACKED}": _fma_half,
        f"neg{{|.ftz}}{_FLOATS}": "-{0}",
        f"abs{{|.ftz}}{_FLOATS}": "np.abs({0})",
        f"div.rn{{|.ftz}}{_FLOATS}": "{0} / {1}",
        f"rcp.rn{{|.ftz}}{_FLOATS}": "np.reciprocal({0})",
        f"sqrt.rn{{|.ftz}}{_FLOATS}": "np.sqrt({0})",
        f"copysign{_FLOATS}": "np.copysign({1}, {0})",
        # These are correctly rounded here. Hardware results differ within the ulp bounds of the ISA.
        "ex2.approx{|.ftz}.f32": "np.exp2({0})",
        "lg2.approx{|.ftz}.f32": "np.log2({0})",
        "tanh.approx{|.ftz}.f32": "np.tanh({0})",
        "sqrt.approx{|.ftz}.f32": "np.sqrt({0})",
        "sin.approx{|.ftz}.f32": "np.sin({0}.astype(f8)).astype(f4)",
        "cos.approx{|.ftz}.f32": "np.cos({0}.astype(f8)).astype(f4)",
        "rcp.approx{|.ftz}.f32": "np.reciprocal({0})",
        "rsqrt.approx{|.ftz}.f32": "(1.0 / np.sqrt({0}.astype(f8))).astype(f4)",
        "div{.approx|.full}{|.ftz}.f32": "{0} / {1}",
    }
)
computed({f"neg{_PACKED}": "{0} ^ u4.type(0x80008000)", f"abs{_PACKED}": "{0} & u4.type(0x7FFF7FFF)"})
# Pairs of data-centre Blackwell.
_floats(
    {f"{op}{{|.rn}}{{|.ftz}}.f32x2": f"{{0}} {sign} {{1}}" for op, sign in _SIGN.items()}
    | {f"{op}{{|.ftz}}.f32x2": function for op, function in _ROUNDED.items()},
    since=100,
)


# --- predicates -------------------------------------------------------------------------------------------------------

_SIGNED_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_COMPARE = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_COMPARE = {name: f"{{0}} {sign} {{1}}" for name, sign in (_SIGNED_COMPARE | _UNSIGNED_COMPARE).items()}
_FLOAT_COMPARE = {
    **_COMPARE,
    "ne": "({0} < {1}) | ({0} > {1})",  # false where one is NaN; those that end with "u" are true
    "equ": "~(({0} < {1}) | ({0} > {1}))",
    "neu": "{0} != {1}",
    "ltu": "~({0} >= {1})",
    "leu": "~({0} > {1})",
    "gtu": "~({0} <= {1})",
    "geu": "~({0} < {1})",
    "num": "~(np.isnan({0}) | np.isnan({1}))",
    "nan": "(np.isnan({0}) | np.isnan({1}))",
}
_COMBINE = {"": "", ".and": " & d", ".or": " | d", ".xor": " ^ d"}


@form(
    "setp{.eq|.ne|.lt|.le|.gt|.ge|.lo|.ls|.hi|.hs}{|.and|.or|.xor}{}{.b16|.u16|.s16|.b32|.u32|.s32|.b64|.u64|.s64}",
    "setp{.eq|.ne|.lt|.le|.gt|.ge|.equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan}{|.and|.or|.xor}{|.ftz}{.f32|.f64}",
)
def setp(e: Emitter, inst: Inst, compare: str, combine: str, ftz: str, kind: str) -> None:
    """Set `p` or `p|q` to a comparison, combined with operand c by a boolean operation if there is one."""
    target, a, b, *c = inst.operands
    pattern = (_FLOAT_COMPARE if kind[1] == "f" else _COMPARE)[compare[1:]]
    for x in c:  # which p may be
        e.line(f"d = {e.get(x, 'p')}")
    e.line(f"c = {pattern.format(*(_flushed(e, bool(ftz), e.get(x, tag(kind))) for x in (a, b)))}")
    for item, text in zip(e.items(target), ("c", "~c"), strict=False):
        e.set(item, "p", text + _COMBINE[combine])


computed(
    {"selp{.b16|.u16|.s16|.b32|.u32|.s32|.f32|.b64|.u64|.s64|.f64}": "where({2}, {0}, {1})"},
    kinds={"operands": ". . p"},
)
