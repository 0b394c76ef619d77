"""Packed float32 arithmetic and conversions to 4- and 8-bit floats, against arithmetic in rationals."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from cute_attn.emulator.dtypes import Array
from tests.emulator.micro import emulate
from tests.emulator.micro.blackwell import TARGET, VERSION
from tests.emulator.micro.case import elementwise

pytestmark = pytest.mark.emulator

EDGES = [0.0, -0.0, 1.0, -1.5, 3.4e38, 2.0**-126, -(2.0**-149), 1 + 2.0**-23, 0.1, 6.0, -448.0, 1e-3]


def _run(code: str, inputs: Array, result: str) -> Array:
    """Run `code` in a thread per row of `inputs`, whose fp32 numbers are %a0, ...; words of %d, of type `result`."""
    rows = np.resize(inputs, (-(-len(inputs) // 32) * 32, inputs.shape[1])).astype(np.float32)
    columns = [np.ascontiguousarray(column).view(np.uint32) for column in rows.T]
    kinds = ("f32",) * len(columns)
    lines = [".reg .b8 %c;", code]
    case = elementwise(
        "sm100", code, lines, kinds, result, count=len(rows), data=columns, version=VERSION, target=TARGET
    )
    return np.frombuffer(emulate.run(case), np.uint32).reshape(len(rows), -1)[: len(inputs)]


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
    packs = " ".join(f"mov.b64 %rd{i}, {{%a{2 * i}, %a{2 * i + 1}}};" for i in range(count))
    code = f"{packs} {op}.{mode}.f32x2 %d, {', '.join(f'%rd{i}' for i in range(count))};"
    found = _run(code, x, "b64").view(np.float32)
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
        found = _run("cvt.rn.satfinite.e2m1x2.f32 %c, %a0, %a1; cvt.u32.u8 %d, %c;", pairs, "b32")[:, 0]
        expected = [_nearest(float(a), type_) << 4 | _nearest(float(b), type_) for a, b in pairs]
    else:
        code = f"cvt.rn.satfinite.{type_}x2.f32 %h0, %a0, %a1; cvt.u32.u16 %d, %h0;"
        found = _run(code, pairs, "b32")[:, 0]
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
    source, width = ("cvt.u8.u32 %c, %r0;", 4) if type_ == "e2m1" else ("cvt.u16.u32 %h0, %r0;", 8)
    convert = f"cvt.rn{relu}.{to}x2.{type_}x2 %d, {source.split()[1][:-1]};"
    word = (codes << width | codes[::-1])[:, None].astype(np.float32)
    found = _run(f"cvt.rzi.u32.f32 %r0, %a0; {source} {convert}", word, "b32")[:, 0]
    np.testing.assert_array_equal(found, bits << np.uint32(16) | bits[::-1])


def test_three_inputs() -> None:
    x = _samples(3)
    for op, function in (("max", np.max), ("min", np.min)):
        found = _run(f"{op}.f32 %d, %a0, %a1, %a2;", x, "b32").view(np.float32)
        np.testing.assert_array_equal(found[:, 0], function(x, axis=1))
