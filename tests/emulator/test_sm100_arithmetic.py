"""Packed float32 arithmetic and conversions to 4- and 8-bit floats, against arithmetic in rationals."""

from __future__ import annotations

import itertools
import struct
from fractions import Fraction

import numpy as np
import pytest

from cute_attn.emulator import run
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.memory import GlobalMemory

pytestmark = pytest.mark.emulator

EDGES = [0.0, -0.0, 1.0, -1.5, 3.4e38, 2.0**-126, -(2.0**-149), 1 + 2.0**-23, 0.1, 6.0, -448.0, 1e-3]


def _run(code: str, inputs: Array, width: int) -> Array:
    """Thread i loads row i of `inputs` (float32) into %f0..., runs `code` and stores `width` bytes from %o."""
    count = inputs.shape[1]
    rows = np.resize(inputs, (-(-len(inputs) // 32) * 32, count)).astype(np.float32)
    out = np.zeros((len(rows), 2), np.uint32)
    memory = GlobalMemory()
    memory.add("in", 1 << 40, rows.nbytes, writable=False, data=rows.view(np.uint8).reshape(-1))
    memory.add("out", 2 << 40, out.nbytes, valid=False, data=out.view(np.uint8).reshape(-1))
    loads = " ".join(f"ld.global.f32 %f{i}, [%a+{4 * i}];" for i in range(count))
    store = {
        8: "st.global.b64 [%b], %o;",
        4: "st.global.b32 [%b], %w;",
        2: "cvt.u32.u16 %w, %h; st.global.b32 [%b], %w;",
    }
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 p_in, .param .u64 p_out)
{{
.reg .f32 %f<8>; .reg .b64 %a; .reg .b64 %b; .reg .b64 %o; .reg .b64 %p<4>; .reg .b32 %w; .reg .b32 %t; .reg .b16 %h;
.reg .b8 %c;
mov.u32 %t, %tid.x; mov.u32 %w, %ctaid.x; mad.lo.u32 %t, %w, 32, %t;
ld.param.u64 %b, [p_in]; mul.wide.u32 %a, %t, {4 * count}; add.u64 %a, %a, %b;
{loads}
ld.param.u64 %a, [p_out]; mul.wide.u32 %b, %t, 8; add.u64 %b, %a, %b;
{code}
{store[width]}
ret;
}}"""
    params = struct.pack("<2Q", 1 << 40, 2 << 40)
    launch = {
        "symbol": "kernel",
        "grid": (len(rows) // 32, 1, 1),
        "block": (32, 1, 1),
        "smem_bytes": 0,
        "params": params,
    }
    run.launch(text, launch, memory)
    return out[: len(inputs)]


def _rounded(x: Fraction, mode: str) -> np.float32:
    """The float32 next to a rational, by comparing neighbours."""
    near = np.float32(float(x))
    if not np.isfinite(near) or Fraction(float(near)) == x:
        return near
    below = near if Fraction(float(near)) < x else np.nextafter(near, np.float32(-np.inf))
    above = np.nextafter(below, np.float32(np.inf))
    if mode == "rm":
        return below
    if mode == "rp":
        return above
    if mode == "rz":
        return below if x > 0 else above
    down, up = x - Fraction(float(below)), Fraction(float(above)) - x
    if down == up:
        return below if not int(below.view(np.uint32)) & 1 else above
    return below if down < up else above


def _samples(count: int) -> Array:
    rng = np.random.default_rng(2)
    wide = rng.standard_normal((96, count)) * 2.0 ** rng.integers(-20, 20, (96, count))
    edges = rng.choice(np.array(EDGES), (96, count))
    return np.concatenate([wide, edges]).astype(np.float32)


PACKED = [(op, mode) for op in ("add", "sub", "mul") for mode in ("rn", "rz", "rm", "rp")] + [("fma", "rn")]


@pytest.mark.parametrize(("op", "mode"), PACKED)
def test_packed(op: str, mode: str) -> None:
    x = _samples(6 if op == "fma" else 4)
    count = x.shape[1] // 2
    packs = " ".join(f"mov.b64 %p{i}, {{%f{2 * i}, %f{2 * i + 1}}};" for i in range(count))
    found = _run(f"{packs} {op}.{mode}.f32x2 %o, {', '.join(f'%p{i}' for i in range(count))};", x, 8).view(np.float32)
    for row, got in zip(x, found, strict=True):
        for half in (0, 1):
            a, b, *c = (Fraction(float(v)) for v in row[half::2])
            exact = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + (c[0] if c else 0)}[op]
            if exact != 0 and abs(exact) < Fraction(2) ** 128:
                assert got[half] == _rounded(exact, mode), (row, half)


def _levels(type_: str) -> list[Fraction]:
    """Numbers of the codes of a format without sign, up to the largest finite one."""
    exponent_bits, mantissa_bits = int(type_[1]), int(type_[3])
    bias = (1 << (exponent_bits - 1)) - 1
    found = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        unit = Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)
        found.append((mantissa + (1 << mantissa_bits if exponent else 0)) * unit)
    return found[: {"e4m3": 127, "e5m2": 124}.get(type_, len(found))]


def _nearest(x: float, type_: str) -> int:
    levels = _levels(type_)
    size = min(abs(Fraction(x)), levels[-1])
    _, _, code = min((abs(level - size), code & 1, code) for code, level in enumerate(levels))
    sign = int(np.signbit(np.float32(x))) << (int(type_[1]) + int(type_[3]))
    return code | sign


@pytest.mark.parametrize("type_", ["e4m3", "e5m2", "e2m1"])
def test_narrow(type_: str) -> None:
    levels = [float(v) for v in _levels(type_)]
    ties = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    values = np.array([s * v for v in [*levels, *ties, *np.abs(EDGES), 0.3, 5.1, 1e9] for s in (1, -1)], np.float32)
    pairs = np.stack([values, np.roll(values, 7)], axis=1)
    if type_ == "e2m1":
        code = "cvt.rn.satfinite.e2m1x2.f32 %c, %f0, %f1; cvt.u32.u8 %w, %c;"
        found = _run(code, pairs, 4)[:, 0]
        expected = [_nearest(float(a), type_) << 4 | _nearest(float(b), type_) for a, b in pairs]
    else:
        found = _run(f"cvt.rn.satfinite.{type_}x2.f32 %h, %f0, %f1;", pairs, 2)[:, 0]
        expected = [_nearest(float(a), type_) << 8 | _nearest(float(b), type_) for a, b in pairs]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("to", ["f16", "bf16"])
@pytest.mark.parametrize("type_", ["e4m3", "e5m2", "e2m1"])
def test_widen(type_: str, to: str, relu: str) -> None:
    """Every code, from a float32 that carries it as an integer; NaN is canonical."""
    finite, count = [float(x) for x in _levels(type_)], 1 << (int(type_[1]) + int(type_[3]))
    numbers = np.array([*finite, *[np.inf] * (type_ == "e5m2"), *[np.nan] * count][:count], np.float32)
    signed = np.concatenate([numbers, -numbers])
    if relu:
        signed = np.where(np.signbit(signed) & ~np.isnan(signed), np.float32(0), signed)
    bits = signed.astype(np.float16).view(np.uint16) if to == "f16" else signed.view(np.uint32) >> np.uint32(16)
    bits = np.where(np.isnan(signed), 0x7FFF, bits).astype(np.uint32)
    codes = np.arange(2 * count)
    source, width = ("cvt.u8.u32 %c, %w;", 4) if type_ == "e2m1" else ("cvt.u16.u32 %h, %w;", 8)
    convert = f"cvt.rn{relu}.{to}x2.{type_}x2 %w, {source.split()[1][:-1]};"
    word = (codes << width | codes[::-1])[:, None].astype(np.float32)
    found = _run(f"cvt.rzi.u32.f32 %w, %f0; {source} {convert}", word, 4)[:, 0]
    np.testing.assert_array_equal(found, bits << np.uint32(16) | bits[::-1])


def test_three_inputs() -> None:
    x = _samples(3)
    for op, function in (("max", np.max), ("min", np.min)):
        found = _run(f"{op}.f32 %f3, %f0, %f1, %f2; mov.b32 %w, %f3;", x, 4)[:, :1].copy().view(np.float32)
        np.testing.assert_array_equal(found[:, 0], function(x, axis=1))
