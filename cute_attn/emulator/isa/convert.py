"""cvt, cvta: between integers, floats, packed 16-bit, fp8 and fp4 formats."""

from __future__ import annotations

import numpy as np

from cute_attn.emulator import formats
from cute_attn.emulator.dtypes import Array, tag
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.ptx import Inst

_INTS = "{.u8|.s8|.u16|.s16|.u32|.s32|.u64|.s64}"
_ROUND = {".rni": "np.rint", ".rzi": "np.trunc", ".rmi": "np.floor", ".rpi": "np.ceil"}


@form(f"cvt{{|.sat}}{_INTS}{_INTS}", golden="convert")
def integer(e: Emitter, inst: Inst, sat: str, to: str, source: str) -> None:
    d, a = inst.operands
    have, want = tag(source), tag(to)
    text = e.get(a, have)
    if sat:
        e.set(d, want, f"{e.bind(_clamp, 'clamp')}({text}, {want})")
    else:
        e.set(d, want, f"{text}.astype({want})")


def _clamp(x: Array, want: np.dtype) -> Array:  # type: ignore[type-arg]
    limits = np.iinfo(want)
    have = np.iinfo(x.dtype)
    return np.clip(x, max(limits.min, have.min), min(limits.max, have.max)).astype(want)


@form(f"cvt{{.rn|.rz|.rm|.rp}}{{.f32|.f64|.f16}}{_INTS}", golden="convert")
def to_float(e: Emitter, inst: Inst, mode: str, to: str, source: str) -> None:
    d, a = inst.operands
    text, want = e.get(a, tag(source)), tag(to)
    if mode != ".rn" and to != ".f64":
        if to == ".f16" or source in (".u64", ".s64"):
            raise PtxError(f"{inst.op}: directed rounding is supported from 32 bits to f32 only")
        e.set(d, "f4", f"{e.bind(_directed_from_int, 'directed')}({text}, {mode[1:]!r})")
        return
    e.set(d, want, f"{text}.astype({want})")


def _directed_from_int(x: Array, mode: str) -> Array:
    wide = x.astype(np.float64)
    return floats.directed(wide, np.zeros_like(wide), mode)


@form(f"cvt{{.rni|.rzi|.rmi|.rpi}}{{|.ftz}}{{|.sat}}{_INTS}{{.f32|.f64|.f16}}", golden="convert")
def to_integer(e: Emitter, inst: Inst, mode: str, ftz: str, sat: str, to: str, source: str) -> None:
    d, a = inst.operands
    name = e.bind(_to_integer, "to_integer")
    e.set(d, tag(to), f"{name}({_ROUND[mode]}({e.get(a, tag(source))}), {tag(to)})")


def _to_integer(x: Array, want: np.dtype) -> Array:  # type: ignore[type-arg]
    """Convert with saturation, as hardware does; NaN gives 0, or only the top bit for 64-bit targets."""
    limits = np.iinfo(want)
    wide = x.astype(np.float64)
    found = np.where(np.isnan(wide), 0, np.clip(wide, float(limits.min), float(limits.max)))
    top = found >= float(limits.max)
    result = np.where(top, 0, found).astype(want)
    nan = np.array(1 << 63, np.uint64).astype(want) if np.dtype(want).itemsize == 8 else np.array(0, want)
    result = np.where(top, np.array(limits.max, want), result)
    chosen: Array = np.where(np.isnan(wide), nan, result)
    return chosen


@form("cvt{.rni|.rzi|.rmi|.rpi}{|.ftz}{|.sat}{.f32.f32|.f64.f64}", golden="convert")
def to_whole(e: Emitter, inst: Inst, mode: str, ftz: str, sat: str, kinds: str) -> None:
    d, a = inst.operands
    t = tag(kinds[1:4])
    e.set(d, t, f"{_ROUND[mode]}({e.get(a, t)})")


@form("cvt{|.ftz}{|.sat}.f32.f32", "cvt.f64.f32", "cvt{|.ftz}.f32.f16", "cvt{|.ftz}.f32.bf16", golden="convert")
def widen(e: Emitter, inst: Inst, *options: str) -> None:
    d, a = inst.operands
    to, source = inst.op.split(".")[-2:]
    if source == "bf16":
        e.set(d, "f4", f"{e.bind(floats.bf16_to_f32, 'bf16_to_f32')}({e.get(a, 'u2')})")
        return
    text = f"{e.get(a, tag(source))}.astype({tag(to)})"
    if ".sat" in options:
        text = f"np.clip({text}, f4.type(0), f4.type(1))"
    e.set(d, tag(to), f"{e.bind(floats.flush, 'flush')}({text})" if ".ftz" in options and source == "f32" else text)


@form("cvt{.rn|.rz|.rm|.rp}{|.ftz}.f32.f64", golden="convert")
def narrow64(e: Emitter, inst: Inst, mode: str, ftz: str) -> None:
    d, a = inst.operands
    text = e.get(a, "f8")
    if mode == ".rn":
        e.set(d, "f4", f"{text}.astype(f4)")
    else:
        e.set(d, "f4", f"{e.bind(_directed_from_f64, 'directed')}({text}, {mode[1:]!r})")


def _directed_from_f64(x: Array, mode: str) -> Array:
    return floats.directed(x, np.zeros_like(x), mode)


@form("cvt{.rn|.rz}{|.relu}{.f16|.bf16}.f32", golden="convert")
def narrow(e: Emitter, inst: Inst, mode: str, relu: str, to: str) -> None:
    d, a = inst.operands
    source = _relu(e, relu, e.get(a, "f4"))
    function = e.bind(floats.f32_to_f16 if to == ".f16" else floats.f32_to_bf16, "narrow")
    e.set(d, "f2" if to == ".f16" else "u2", f"{function}({source}, {mode[1:]!r})")


@form("cvt{.rn|.rz}{|.relu}{.f16x2|.bf16x2}.f32", golden="convert")
def narrow_pair(e: Emitter, inst: Inst, mode: str, relu: str, to: str) -> None:
    """Convert a pair; operand a goes to the upper half."""
    d, a, b = inst.operands
    high, low = (_relu(e, relu, e.get(x, "f4")) for x in (a, b))
    name = e.bind(_narrow_pair, "narrow_pair")
    e.set(d, "u4", f"{name}({low}, {high}, {to!r}, {mode[1:]!r})")


def _narrow_pair(low: Array, high: Array, to: str, mode: str) -> Array:
    both = floats.interleaved(low, high)
    half = floats.f32_to_f16(both, mode).view(np.uint16) if to == ".f16x2" else floats.f32_to_bf16(both, mode)
    packed: Array = half.view(np.uint32)
    return packed


def _relu(e: Emitter, relu: str, text: str) -> str:
    return f"np.maximum({text}, f4.type(0))" if relu else text


@form("cvt.rn.satfinite{|.relu}{.e4m3x2|.e5m2x2}{.f32|.f16x2}", since=89, golden="fp8")
def to_fp8(e: Emitter, inst: Inst, relu: str, to: str, source: str) -> None:
    d, *operands = inst.operands
    kind = to[1:5]
    if source == ".f32":
        high, low = (e.get(x, "f4") for x in operands)
        pair = f"({low}, {high})"
    else:
        pair = f"{e.bind(_halves, 'halves')}({e.get(operands[0], 'u4')})"
    e.set(d, "u2", f"{e.bind(_fp8_pair, 'fp8_pair')}({pair}, {kind!r}, {bool(relu)})")


def _halves(x: Array) -> tuple[Array, Array]:
    wide = floats.unpack16(x).view(np.float16).astype(np.float32)
    return wide[:, 0], wide[:, 1]


def _fp8_pair(pair: tuple[Array, Array], kind: str, relu: bool) -> Array:
    low, high = np.broadcast_arrays(*pair)
    codes = np.stack([formats.encode(low, kind, relu), formats.encode(high, kind, relu)], axis=1)
    packed: Array = np.ascontiguousarray(codes).view(np.uint16)[:, 0]
    return packed


@form("cvt.rn{|.relu}.f16x2{.e4m3x2|.e5m2x2}", since=89, golden="fp8")
def from_fp8(e: Emitter, inst: Inst, relu: str, source: str) -> None:
    d, a = inst.operands
    e.set(d, "u4", f"{e.bind(_from_fp8, 'from_fp8')}({e.get(a, 'u2')}, {source[1:5]!r}, {bool(relu)})")


def _from_fp8(x: Array, kind: str, relu: bool) -> Array:
    codes = np.ascontiguousarray(x).view(np.uint8)
    wide = formats.decode(codes, kind)
    if relu:
        wide = np.where(np.isnan(wide), wide, np.maximum(wide, np.float32(0)))
    packed: Array = floats.f32_to_f16(wide).view(np.uint32)
    return packed


@form("cvt.rn{|.relu}.bf16x2{.e4m3x2|.e5m2x2}", since=100, conformance="unverified")
def small_to_bf16(e: Emitter, inst: Inst, relu: str, source: str) -> None:
    d, a = inst.operands
    e.set(d, "u4", f"{e.bind(_small_to_bf16, 'small_to_bf16')}({e.get(a, 'u2')}, {source[1:5]!r}, {bool(relu)})")


def _small_to_bf16(x: Array, kind: str, relu: bool) -> Array:
    return _bf16_pair(formats.decode(np.ascontiguousarray(x).view(np.uint8), kind), relu)


def _bf16_pair(wide: Array, relu: bool) -> Array:
    """Pack neighbours into words."""
    if relu:
        wide = np.where(np.isnan(wide), wide, np.maximum(wide, np.float32(0)))
    packed: Array = np.ascontiguousarray(floats.f32_to_bf16(wide)).reshape(-1).view(np.uint32)
    return packed


@form("cvt.rn.satfinite{|.relu}.e2m1x2.f32", since=100, conformance="unverified")
def to_fp4(e: Emitter, inst: Inst, relu: str) -> None:
    """Convert a pair; operand a goes to the upper four bits."""
    d, a, b = inst.operands
    e.set(d, "u1", f"{e.bind(_fp4_pair, 'fp4_pair')}(({e.get(b, 'f4')}, {e.get(a, 'f4')}), {bool(relu)})")


def _fp4_pair(pair: tuple[Array, Array], relu: bool) -> Array:
    low, high = pair
    packed: Array = formats.encode(low, "e2m1", relu) | (formats.encode(high, "e2m1", relu) << np.uint8(4))
    return packed


@form("cvt.rn{|.relu}{.f16x2|.bf16x2}.e2m1x2", since=100, conformance="unverified")
def from_fp4(e: Emitter, inst: Inst, relu: str, to: str) -> None:
    d, a = inst.operands
    function = _fp4_to_f16 if to == ".f16x2" else _fp4_to_bf16
    e.set(d, "u4", f"{e.bind(function, 'from_fp4')}({e.get(a, 'u1')}, {bool(relu)})")


def _fp4_to_f16(x: Array, relu: bool) -> Array:
    wide = _fp4_values(x)
    if relu:
        wide = np.maximum(wide, np.float32(0))
    packed: Array = np.ascontiguousarray(wide.astype(np.float16)).view(np.uint32)[:, 0]
    return packed


def _fp4_to_bf16(x: Array, relu: bool) -> Array:
    return _bf16_pair(_fp4_values(x), relu)


def _fp4_values(x: Array) -> Array:
    return formats.decode(np.stack([x & 15, x >> np.uint8(4)], axis=1), "e2m1")


@form("cvta{|.to}{.global|.param|.const}.u64", conformance="order")
def cvta(e: Emitter, inst: Inst, direction: str, space: str) -> None:
    """Copy the address: these spaces have generic addresses."""
    e.set(inst.operands[0], "u8", e.get(inst.operands[1], "u8"))


@form("cvta.shared{|::cta|::cluster}.u64", conformance="order")
def cvta_shared(e: Emitter, inst: Inst, space: str) -> None:
    from cute_attn.emulator.memory import GENERIC_SHARED

    e.set(inst.operands[0], "u8", f"{e.get(inst.operands[1], 'u8')} | {e.constant(GENERIC_SHARED, 'u8')}")


@form("cvta.to.shared{|::cta|::cluster}.u64", conformance="order")
def cvta_to_shared(e: Emitter, inst: Inst, space: str) -> None:
    e.set(inst.operands[0], "u8", f"{e.get(inst.operands[1], 'u8')} & {e.constant(0xFFFFFFFF, 'u8')}")
