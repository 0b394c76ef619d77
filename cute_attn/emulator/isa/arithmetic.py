"""add, sub, mul, mad, fma, min, max, div, rem, neg, abs, setp, selp: integers, floats and packed pairs."""

from __future__ import annotations

import numpy as np

from cute_attn.emulator.dtypes import Array, tag
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.ptx import Inst, Pair

_WIDER = {"u2": "u4", "i2": "i4", "u4": "u8", "i4": "i8"}
_SIGN = {"add": "+", "sub": "-", "mul": "*"}
_UNSIGNED = {"i2": "u2", "i4": "u4", "i8": "u8"}


def _binary(e: Emitter, inst: Inst, kind: str, pattern: str) -> None:
    d, a, b = inst.operands
    e.set(d, kind, pattern.format(a=e.get(a, kind), b=e.get(b, kind)))


# --- integers ---------------------------------------------------------------------------------------------------------


@form("{add|sub}{.u16|.s16|.u32|.s32|.u64|.s64}", golden="integer")
def add(e: Emitter, inst: Inst, op: str, kind: str) -> None:
    _binary(e, inst, tag(kind), f"{{a}} {_SIGN[op]} {{b}}")


@form("mul.lo{.u16|.s16|.u32|.s32|.u64|.s64}", golden="integer")
def mul_lo(e: Emitter, inst: Inst, kind: str) -> None:
    _binary(e, inst, tag(kind), "{a} * {b}")


@form("mul.wide{.u16|.s16|.u32|.s32}", golden="integer")
def mul_wide(e: Emitter, inst: Inst, kind: str) -> None:
    d, a, b = inst.operands
    t, wide = tag(kind), _WIDER[tag(kind)]
    e.set(d, wide, f"{e.get(a, t)}.astype({wide}) * {e.get(b, t)}")


@form("mul.hi{.u16|.s16}")
@form("mul.hi{.u32|.s32}", golden="integer")
def mul_hi(e: Emitter, inst: Inst, kind: str) -> None:
    t, wide = tag(kind), _WIDER[tag(kind)]
    _binary(e, inst, t, f"(({{a}}.astype({wide}) * {{b}}) >> {e.constant(int(kind[2:]), wide)}).astype({t})")


@form("mul.hi{.u64|.s64}", golden="integer")
def mul_hi64(e: Emitter, inst: Inst, kind: str) -> None:
    name = e.bind(_high64 if kind == ".u64" else _high64_signed, "high64")
    _binary(e, inst, tag(kind), f"{name}({{a}}, {{b}})")


def _high64(a: Array, b: Array) -> Array:
    m, s = np.uint64(0xFFFFFFFF), np.uint64(32)
    cross = (a & m) * (b >> s) + (((a & m) * (b & m)) >> s)
    other = (a >> s) * (b & m) + (cross & m)
    high: Array = (a >> s) * (b >> s) + (cross >> s) + (other >> s)
    return high


def _high64_signed(a: Array, b: Array) -> Array:
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    high = _high64(ua, ub) - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return high.view(np.int64)


@form("mad.lo{.u16|.s16|.u32|.s32|.u64|.s64}", golden="integer")
def mad_lo(e: Emitter, inst: Inst, kind: str) -> None:
    d, a, b, c = inst.operands
    t = tag(kind)
    e.set(d, t, f"{e.get(a, t)} * {e.get(b, t)} + {e.get(c, t)}")


@form("mad.wide{.u16|.s16|.u32|.s32}", golden="integer")
def mad_wide(e: Emitter, inst: Inst, kind: str) -> None:
    d, a, b, c = inst.operands
    t, wide = tag(kind), _WIDER[tag(kind)]
    e.set(d, wide, f"{e.get(a, t)}.astype({wide}) * {e.get(b, t)} + {e.get(c, wide)}")


@form("mad.hi{.u32|.s32}", golden="integer")
def mad_hi(e: Emitter, inst: Inst, kind: str) -> None:
    d, a, b, c = inst.operands
    t, wide = tag(kind), _WIDER[tag(kind)]
    high = f"(({e.get(a, t)}.astype({wide}) * {e.get(b, t)}) >> {e.constant(32, wide)}).astype({t})"
    e.set(d, t, f"{high} + {e.get(c, t)}")


@form("{div|rem}{.u16|.s16|.u32|.s32|.u64|.s64}", golden="integer")
def divide(e: Emitter, inst: Inst, op: str, kind: str) -> None:
    name = e.bind(_quotient if op == "div" else _remainder, op)
    _binary(e, inst, tag(kind), f"{name}({{a}}, {{b}})")


def _quotient(a: Array, b: Array) -> Array:
    """Divide with truncation. Division by zero gives all ones, as observed on hardware."""
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0)))
    result: Array = np.where(b == 0, np.array(-1).astype(a.dtype), quotient).astype(a.dtype)
    return result


def _remainder(a: Array, b: Array) -> Array:
    result: Array = np.where(b == 0, a, a - _quotient(a, b) * b).astype(a.dtype)
    return result


@form("{min|max}{.u16|.s16|.u32|.s32|.u64|.s64}", golden="integer")
def extreme(e: Emitter, inst: Inst, op: str, kind: str) -> None:
    _binary(e, inst, tag(kind), f"np.{op}imum({{a}}, {{b}})")


@form("{min|max}.relu.s32", since=90, golden="integer")
def extreme_relu(e: Emitter, inst: Inst, op: str) -> None:
    _binary(e, inst, "i4", f"np.maximum(np.{op}imum({{a}}, {{b}}), {e.constant(0, 'i4')})")


@form("neg{.s16|.s32|.s64}", golden="integer")
def neg(e: Emitter, inst: Inst, kind: str) -> None:
    e.set(inst.operands[0], tag(kind), f"-{e.get(inst.operands[1], tag(kind))}")


@form("abs{.s16|.s32|.s64}", golden="integer")
def absolute(e: Emitter, inst: Inst, kind: str) -> None:
    e.set(inst.operands[0], tag(kind), f"np.abs({e.get(inst.operands[1], tag(kind))})")


# --- floats -----------------------------------------------------------------------------------------------------------


def _flushed(e: Emitter, ftz: str, text: str) -> str:
    return f"{e.bind(floats.flush, 'flush')}({text})" if ftz else text


def _add(e: Emitter, mode: str, a: str, b: str, op: str) -> str:
    if mode in ("", ".rn"):
        return f"{a} {_SIGN[op]} {b}"
    return f"{e.bind(floats.add32, 'add32')}({a}, {'-' if op == 'sub' else ''}{b}, {mode[1:]!r})"


@form("{add|sub}{|.rn|.rz|.rm|.rp}{|.ftz}{|.sat}.f32", golden="float32")
def add_f32(e: Emitter, inst: Inst, op: str, mode: str, ftz: str, sat: str) -> None:
    d, *sources = inst.operands
    a, b = (_flushed(e, ftz, e.get(x, "f4")) for x in sources)
    e.set(d, "f4", _saturated(e, sat, _flushed(e, ftz, _add(e, mode, a, b, op))))


@form("mul{|.rn|.rz}{|.ftz}{|.sat}.f32", golden="float32")
def mul_f32(e: Emitter, inst: Inst, mode: str, ftz: str, sat: str) -> None:
    d, *sources = inst.operands
    a, b = (_flushed(e, ftz, e.get(x, "f4")) for x in sources)
    text = f"{a} * {b}"
    if mode == ".rz":
        text = f"{e.bind(_mul_rz, 'mul_rz')}({a}, {b})"
    e.set(d, "f4", _saturated(e, sat, _flushed(e, ftz, text)))


def _mul_rz(a: Array, b: Array) -> Array:
    exact = a.astype(np.float64) * b
    return floats.directed(exact, np.zeros_like(exact), "rz")


def _saturated(e: Emitter, sat: str, text: str) -> str:
    return f"{e.bind(_saturate, 'saturate')}({text})" if sat else text


def _saturate(x: Array) -> Array:
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))  # NaN and -0 become +0


@form("fma.rn{|.ftz}{|.sat}.f32", golden="float32")
def fma_f32(e: Emitter, inst: Inst, ftz: str, sat: str) -> None:
    d, *sources = inst.operands
    a, b, c = (_flushed(e, ftz, e.get(x, "f4")) for x in sources)
    text = f"{e.bind(floats.fma32, 'fma32')}({a}, {b}, {c})"
    e.set(d, "f4", _saturated(e, sat, _flushed(e, ftz, text)))


@form("{add|sub|mul}{|.rn}.f64", golden="float64")
def arithmetic_f64(e: Emitter, inst: Inst, op: str, mode: str) -> None:
    _binary(e, inst, "f8", f"{{a}} {_SIGN[op]} {{b}}")


@form("fma.rn.f64", conformance="approx")
def fma_f64(e: Emitter, inst: Inst) -> None:
    d, *sources = inst.operands
    a, b, c = (e.get(x, "f8") for x in sources)
    e.set(d, "f8", f"{e.bind(_fma64, 'fma64')}({a}, {b}, {c})")


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c: rounded once if the platform's long double has 64 bits of mantissa, and nearly always otherwise."""
    total: Array = (a.astype(np.longdouble) * b + c).astype(np.float64)
    return total


@form("{min|max}{|.ftz}{|.NaN}.f32", golden="float32")
def extreme_f32(e: Emitter, inst: Inst, op: str, ftz: str, nan: str) -> None:
    d, *sources = inst.operands
    text = _flushed(e, ftz, e.get(sources[0], "f4"))
    for source in sources[1:]:  # three inputs from sm_100 on
        text = f"{_extreme(e, op, nan)}({text}, {_flushed(e, ftz, e.get(source, 'f4'))})"
    e.set(d, "f4", text)


def _extreme(e: Emitter, op: str, nan: str) -> str:
    """Bind the function of a min or max; returns its name."""
    suffix = "_nan" if nan else ""
    return e.bind(getattr(floats, f"{op}imum{suffix}"), op + suffix)


@form("{min|max}.f64", golden="float64")
def extreme_f64(e: Emitter, inst: Inst, op: str) -> None:
    _binary(e, inst, "f8", f"{_extreme(e, op, '')}({{a}}, {{b}})")


@form("{neg|abs}{|.ftz}{.f32|.f64}", golden="float32")
def sign(e: Emitter, inst: Inst, op: str, ftz: str, kind: str) -> None:
    source = _flushed(e, ftz, e.get(inst.operands[1], tag(kind)))
    e.set(inst.operands[0], tag(kind), f"-{source}" if op == "neg" else f"np.abs({source})")


@form("copysign{.f32|.f64}", golden="float32")
def copysign(e: Emitter, inst: Inst, kind: str) -> None:
    _binary(e, inst, tag(kind), "np.copysign({b}, {a})")


@form("{div|rcp|sqrt}.rn{|.ftz}{.f32|.f64}", golden="float32")
def divide_float(e: Emitter, inst: Inst, op: str, ftz: str, kind: str) -> None:
    t = tag(kind)
    d, *sources = inst.operands
    values = [_flushed(e, ftz, e.get(x, t)) for x in sources]
    if op == "div":
        text = f"{values[0]} / {values[1]}"
    elif op == "rcp":
        text = f"{e.constant(0x3F800000 if t == 'f4' else 0x3FF0000000000000, t)} / {values[0]}"
    else:
        text = f"np.sqrt({values[0]})"
    e.set(d, t, _flushed(e, ftz, text))


# --- packed 16-bit floats ---------------------------------------------------------------------------------------------


def _halves(x: Array, kind: str) -> Array:
    raw = floats.unpack16(x)
    return raw.view(np.float16).astype(np.float32) if kind == ".f16x2" else floats.bf16_to_f32(raw)


def _narrow(x: Array, kind: str) -> Array:
    """Pack float32 [n, 2] into n words."""
    flat = np.ascontiguousarray(x, np.float32).ravel()
    half = floats.f32_to_f16(flat).view(np.uint16) if kind == ".f16x2" else floats.f32_to_bf16(flat)
    packed: Array = half.view(np.uint32)
    return packed


def _packed(e: Emitter, inst: Inst, kind: str, compute: str) -> None:
    widen, narrow = e.bind(_halves, "halves"), e.bind(_narrow, "narrow")
    d, *sources = inst.operands
    values = [f"{widen}({e.get(x, 'u4')}, {kind!r})" for x in sources]
    e.set(d, "u4", f"{narrow}({compute.format(*values)}, {kind!r})")


@form("{add|sub|mul}{|.rn}{.f16x2|.bf16x2}", golden="half2")
def arithmetic_half2(e: Emitter, inst: Inst, op: str, mode: str, kind: str) -> None:
    """Compute in float32, then round to 16 bits. Double rounding is harmless: 24 bits are at least 2 * 11 + 2."""
    _packed(e, inst, kind, f"{{0}} {_SIGN[op]} {{1}}")


@form("fma.rn{|.relu}{.f16x2|.bf16x2}", golden="half2")
def fma_half2(e: Emitter, inst: Inst, relu: str, kind: str) -> None:
    name = e.bind(_fma_half, "fma_half")
    _packed(e, inst, kind, f"{name}({{0}}, {{1}}, {{2}}, {bool(relu)})")


def _fma_half(a: Array, b: Array, c: Array, relu: bool) -> Array:
    """Compute in float64 and round to odd in float32, so that only the final rounding to 16 bits decides."""
    x, y = a.astype(np.float64) * b, c.astype(np.float64)
    total = floats._to_odd(x + y, x, y)
    near = total.astype(np.float32)
    bits = near.view(np.int32)
    inexact = (near.astype(np.float64) != total) & ((bits & 1) == 0)
    outward = np.abs(total) > np.abs(near.astype(np.float64))
    result: Array = np.where(inexact, bits + np.where(outward, 1, -1), bits).astype(np.int32).view(np.float32)
    return np.maximum(result, np.float32(0)) if relu else result


@form("{min|max}{|.NaN}{.f16x2|.bf16x2}", golden="half2")
def extreme_half2(e: Emitter, inst: Inst, op: str, nan: str, kind: str) -> None:
    _packed(e, inst, kind, f"{_extreme(e, op, nan)}({{0}}, {{1}})")


@form("{neg|abs}{.f16x2|.bf16x2}", golden="half2")
def sign_half2(e: Emitter, inst: Inst, op: str, kind: str) -> None:
    source = e.get(inst.operands[1], "u4")
    mask = e.constant(0x80008000 if op == "neg" else 0x7FFF7FFF, "u4")
    e.set(inst.operands[0], "u4", f"{source} {'^' if op == 'neg' else '&'} {mask}")


# --- predicates -------------------------------------------------------------------------------------------------------

_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_COMPARE = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def _assign(e: Emitter, inst: Inst, text: str, combine: str = "") -> None:
    """Set `p` or `p|q` to a comparison, combined with operand c by a boolean operation if there is one."""
    target = inst.operands[0]
    if combine:
        sign = {".and": "&", ".or": "|", ".xor": "^"}[combine]
        third = e.get(inst.operands[3], "p")
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    e.line(f"c = {text}")
    e.set(first, "p", f"c {sign} {third}" if combine else "c")
    if second is not None:
        e.set(second, "p", f"~c {sign} {third}" if combine else "~c")


@form(
    "setp{.eq|.ne|.lt|.le|.gt|.ge|.lo|.ls|.hi|.hs}{|.and|.or|.xor}{.b16|.u16|.s16|.b32|.u32|.s32|.b64|.u64|.s64}",
    golden="predicate",
)
def setp(e: Emitter, inst: Inst, compare: str, combine: str, kind: str) -> None:
    sign = _COMPARE.get(compare[1:]) or _UNSIGNED_COMPARE[compare[1:]]
    t = tag(kind)
    _assign(e, inst, f"{e.get(inst.operands[1], t)} {sign} {e.get(inst.operands[2], t)}", combine)


@form(
    "setp{.eq|.ne|.lt|.le|.gt|.ge|.equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan}{|.and|.or|.xor}{|.ftz}{.f32|.f64}",
    golden="predicate",
)
def setp_float(e: Emitter, inst: Inst, compare: str, combine: str, ftz: str, kind: str) -> None:
    t = tag(kind)
    a, b = (_flushed(e, ftz, e.get(x, t)) for x in inst.operands[1:3])
    name = compare[1:]
    if name in ("num", "nan"):
        text = f"{'~' if name == 'num' else ''}(np.isnan({a}) | np.isnan({b}))"
    elif name == "ne":
        text = f"({a} < {b}) | ({a} > {b})"
    elif name in _COMPARE:
        text = f"{a} {_COMPARE[name]} {b}"
    else:
        opposite = {"equ": None, "neu": "!=", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}[name]
        text = {
            "equ": f"~(({a} < {b}) | ({a} > {b}))",
            "neu": f"{a} != {b}",
        }.get(name) or f"~({a} {opposite} {b})"
    _assign(e, inst, text, combine)


@form("selp{.b16|.u16|.s16|.b32|.u32|.s32|.f32|.b64|.u64|.s64|.f64}", golden="predicate")
def selp(e: Emitter, inst: Inst, kind: str) -> None:
    d, a, b, p = inst.operands
    t = tag(kind)
    e.set(d, t, f"where({e.get(p, 'p')}, {e.get(a, t)}, {e.get(b, t)})")


_LOGIC = {"and": "&", "or": "|", "xor": "^"}


@form("{and|or|xor}.pred", golden="predicate")
def logic_pred(e: Emitter, inst: Inst, op: str) -> None:
    _binary(e, inst, "p", f"{{a}} {_LOGIC[op]} {{b}}")


@form("not.pred", golden="predicate")
def not_pred(e: Emitter, inst: Inst) -> None:
    e.set(inst.operands[0], "p", f"~{e.get(inst.operands[1], 'p')}")
