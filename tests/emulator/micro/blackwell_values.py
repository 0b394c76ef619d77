"""Arithmetic, conversions and reductions that Blackwell adds; results worked out in rationals from the PTX ISA."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tests.emulator.micro.blackwell import Known, text
from tests.emulator.micro.case import Case, rng, values

Array = np.ndarray[Any, Any]
VERSION = "9.1"  # of PTX: the first with conversions from packed 16-bit numbers to 4 and 6 bits
COUNT = 256
FORMATS = {
    "e4m3": (4, 3),
    "e5m2": (5, 2),
    "e2m3": (2, 3),
    "e3m2": (3, 2),
    "e2m1": (2, 1),
    "f16": (5, 10),
    "bf16": (8, 7),
}
FINITE = {"e4m3": 127, "e5m2": 124, "f16": 31 << 10, "bf16": 255 << 7}  # number of codes that are finite, of all codes


@functools.cache
def value_cases() -> tuple[Known, ...]:
    return (*_packed(), *_three(), *_stochastic(), *_narrowing(), *_widening(), *_scales(), *_reductions())


# --- formats ----------------------------------------------------------------------------------------------------------


@functools.cache
def level(code: int, kind: str) -> Fraction:
    """The number that a code without sign stands for; beyond the finite ones, what the pattern continues to."""
    exponent_bits, mantissa_bits = FORMATS[kind]
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    unit = Fraction(2) ** (max(exponent, 1) - (1 << (exponent_bits - 1)) + 1 - mantissa_bits)
    return (mantissa + ((1 << mantissa_bits) if exponent else 0)) * unit


def width(kind: str) -> int:
    """Bits with the sign."""
    return 1 + sum(FORMATS[kind])


def finite_codes(kind: str) -> int:
    return FINITE.get(kind, 1 << (width(kind) - 1))


def encoded(x: np.float32, kind: str, away: Callable[[int, Fraction], bool], *, relu: bool, finite: bool) -> int:
    """Code of a float32. `away(code, share)`: whether it goes to code + 1, `share` of the way to which it has come."""
    top = finite_codes(kind) - 1
    nan = {"e4m3": 127, "e5m2": 127, "f16": 0x7FFF, "bf16": 0x7FFF}.get(kind, top)
    if np.isnan(x):
        return nan
    sign = int(np.signbit(x)) << (width(kind) - 1)
    if relu and sign:
        return 0
    if np.isinf(x) or abs(Fraction(float(x))) >= level(top + 1, kind):
        return sign | (top if finite else top + 1)
    size, low, high = abs(Fraction(float(x))), 0, top
    while low < high:  # the last code that is not larger
        middle = (low + high + 1) // 2
        low, high = (middle, high) if level(middle, kind) <= size else (low, middle - 1)
    code = low + away(low, (size - level(low, kind)) / (level(low + 1, kind) - level(low, kind)))
    return sign | (min(code, top) if finite else code)


def _nearest(code: int, share: Fraction) -> bool:
    return share > Fraction(1, 2) or (share == Fraction(1, 2) and code % 2 == 1)


def _samples(name: str, kind: str, count: int) -> Array:
    """Numbers at, between and beyond those of a format, and the edges of float32."""
    source = rng(name)
    codes = source.integers(0, finite_codes(kind) - 1, count)
    low = np.array([float(level(int(c), kind)) for c in codes])
    step = np.array([float(level(int(c) + 1, kind)) for c in codes]) - low
    share = source.choice([0, 0.25, 0.5, 0.75, 2.0**-9, 1 - 2.0**-9, 2.0**-13, 0.3, 0.9], count)
    with np.errstate(over="ignore"):
        found = ((low + share * step) * source.choice([-1, 1], count)).astype(np.float32)
    found[:32] = values("f32", 32, source).view(np.float32)
    return found


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _case(
    name: str,
    code: Sequence[str],
    inputs: Sequence[Array],
    want: Array,
    size: int,
    *,
    byte: str = "",
) -> Known:
    """A thread per row: inputs in %a0.., all of 32 bits, and the result in %d, of `size` bits."""
    count = len(want)
    kernel = text(VERSION, threads=count)
    kernel.add(*(f".reg .b32 %a{i};" for i in range(len(inputs))), f".reg .b{size} %d;", ".reg .b64 %at;", byte)
    addresses = [
        f"mad.wide.u32 %at, %me, 4, %src; ld.global.b32 %a{i}, [%at+{4 * count * i}];" for i in range(len(inputs))
    ]
    kernel.add(*addresses)
    kernel.add(*code, f"mad.wide.u32 %at, %me, {size // 8}, %dst;", f"st.global.b{size} [%at], %d;")
    data = b"".join(x.astype(np.uint32).tobytes() for x in inputs)
    assert len(data) == 4 * count * len(inputs)
    out = want.astype(f"u{size // 8}").tobytes()
    return Known(Case("values", name, kernel.ptx(), data, len(out), threads=count), out)


# --- float32, two or three at a time ----------------------------------------------------------------------------------

EDGES = [0.0, -0.0, 1.0, -1.5, 3.4e38, 2.0**-126, -(2.0**-149), 1 + 2.0**-23, 0.1, 6.0, -448.0, 1e-3]
EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


def _packed() -> Iterator[Known]:
    for op, mode in [*itertools.product(("add", "sub", "mul"), ("rn", "rz", "rm", "rp")), ("fma", "rn")]:
        name, count = f"{op}.{mode}.f32x2", 3 if op == "fma" else 2
        source, rows, want = rng(name), list[Array](), list[int]()
        while len(rows) < COUNT:
            wide = source.standard_normal(2 * count) * 2.0 ** source.integers(-20, 20, 2 * count)
            row = np.float32(wide if len(rows) < COUNT // 2 else source.choice(np.array(EDGES), 2 * count))
            exact = [EXACT[op](*(Fraction(float(x)) for x in row[half::2])) for half in (0, 1)]
            if all(x != 0 and abs(x) < Fraction(2) ** 128 for x in exact):  # the others have no neighbours, or a sign
                rows.append(row)
                want.append(sum(int(_rounded(x, mode).view(np.uint32)) << 32 * i for i, x in enumerate(exact)))
        code = [f"mov.b64 %rd{10 + i}, {{%a{2 * i}, %a{2 * i + 1}}};" for i in range(count)]
        code.append(f"{name} %d, {', '.join(f'%rd{10 + i}' for i in range(count))};")
        yield _case(name, code, list(_bits(np.stack(rows, axis=1))), np.array(want, np.uint64), 64)


def _rounded(x: Fraction, mode: str) -> np.float32:
    """The float32 next to a rational, by comparing neighbours."""
    near = np.float32(float(x))
    if not np.isfinite(near) or Fraction(float(near)) == x:
        return near
    below = near if Fraction(float(near)) < x else np.nextafter(near, np.float32(-np.inf))
    above = np.nextafter(below, np.float32(np.inf))
    if mode != "rn":
        return below if mode == "rm" or (mode == "rz" and x > 0) else above
    down, up = x - Fraction(float(below)), Fraction(float(above)) - x
    if down == up:
        return above if int(below.view(np.uint32)) & 1 else below
    return below if down < up else above


def _three() -> Iterator[Known]:
    for op, function in (("max", np.max), ("min", np.min)):
        x = rng(op).choice(np.array([v for v in EDGES if v]), (3, COUNT)).astype(np.float32)
        yield _case(f"{op}.f32.three", [f"{op}.f32 %d, %a0, %a1, %a2;"], list(_bits(x)), _bits(function(x, axis=0)), 32)


# --- cvt.rs -----------------------------------------------------------------------------------------------------------

OPTIONS = ("", ".relu", ".satfinite", ".relu.satfinite", ".satfinite.relu")


def _stochastic() -> Iterator[Known]:
    for kind, random_bits in (("f16", 13), ("bf16", 16)):
        for options in OPTIONS:
            yield _stochastic_pair(f"cvt.rs{options}.{kind}x2.f32", kind, random_bits, options)
    for kind, options in itertools.product(("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"), (".satfinite", ".relu.satfinite")):
        yield _stochastic_four(f"cvt.rs{options}.{kind}x4.f32", kind, options)


def _carry(random: int, count: int) -> Callable[[int, Fraction], bool]:
    return lambda code, share: share + Fraction(random, 1 << count) >= 1


def _stochastic_pair(name: str, kind: str, count: int, options: str) -> Known:
    a, b = (_samples(name + x, kind, COUNT) for x in "ab")
    random = rng(name + "r").integers(0, 1 << 32, COUNT, dtype=np.uint64)
    random[::4] = 0xFFFFFFFF
    want = np.zeros(COUNT, np.uint64)
    for i in range(COUNT):
        for x, shift in ((a[i], 16), (b[i], 0)):
            bits = int(random[i]) >> shift & ((1 << count) - 1)
            flags = {"relu": ".relu" in options, "finite": ".satfinite" in options}
            want[i] |= np.uint64(encoded(x, kind, _carry(bits, count), **flags) << shift)
    return _case(name, [f"{name} %d, %a0, %a1, %a2;"], [_bits(a), _bits(b), random], want, 32)


def _stochastic_four(name: str, kind: str, options: str) -> Known:
    sources = [_samples(name + x, kind, COUNT) for x in "abef"]
    random = rng(name + "r").integers(0, 1 << 32, COUNT, dtype=np.uint64)
    # (lowest bit, number of bits) of the random bits of a, b, e and f
    places = [(24, 8), (8, 8), (16, 8), (0, 8)] if kind == "e2m1" else [(16, 16), (16, 16), (0, 16), (0, 16)]
    step = 4 if kind == "e2m1" else 8
    want = np.zeros(COUNT, np.uint64)
    for i in range(COUNT):
        for number, (shift, count) in enumerate(places):
            bits = int(random[i]) >> shift & ((1 << count) - 1)
            code = encoded(sources[number][i], kind, _carry(bits, count), relu=".relu" in options, finite=True)
            want[i] |= np.uint64(code << step * (3 - number))
    text_ = f"{name} %d, {{%a0, %a1, %a2, %a3}}, %a4;"
    return _case(name, [text_], [*map(_bits, sources), random], want, 16 if kind == "e2m1" else 32)


# --- to smaller formats and back --------------------------------------------------------------------------------------


def _narrowing() -> Iterator[Known]:
    for kind, source, relu in itertools.product(
        ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"), ("f16", "bf16", "f32"), ("", ".relu")
    ):
        if source == "f16" and kind in ("e4m3", "e5m2"):
            continue  # Hopper has them
        pair = f"{source}x2" if source != "f32" else source
        name = f"cvt.rn.satfinite{relu}.{kind}x2.{pair}"
        if source == "f32":
            values_, inputs = _ties(kind), list(map(_bits, _ties(kind)))
        else:
            halves = [_as16(_samples(name + x, kind, COUNT), source) for x in "ab"]
            values_ = [half[0] for half in halves]
            inputs = [halves[0][1].astype(np.uint32) << np.uint32(16) | halves[1][1]]
        step = 4 if kind == "e2m1" else 8
        want = np.zeros(len(inputs[0]), np.uint64)
        for i, (high, low) in enumerate(zip(*values_, strict=True)):
            for x, shift in ((high, step), (low, 0)):
                want[i] |= np.uint64(encoded(np.float32(x), kind, _nearest, relu=bool(relu), finite=True) << shift)
        registers = ", ".join(f"%a{i}" for i in range(len(inputs)))
        if kind == "e2m1":
            code, byte = [f"{name} %c, {registers};", "cvt.u16.u8 %d, %c;"], ".reg .b8 %c;"
            yield _case(name, code, inputs, want, 16, byte=byte)
        else:
            yield _case(name, [f"{name} %d, {registers};"], inputs, want, 16)


def _ties(kind: str) -> list[Array]:
    """All numbers of a format and all midpoints, with both signs, and a few others, in two rows."""
    levels = [float(level(code, kind)) for code in range(finite_codes(kind))]
    ties = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    signed = np.array([s * v for v in [*levels, *ties, *np.abs(EDGES), 0.3, 5.1, 1e9] for s in (1, -1)], np.float32)
    return list(np.resize(signed, (2, -(-len(signed) // 64) * 32)))


def _as16(x: Array, kind: str) -> tuple[Array, Array]:
    """(values, bits) of numbers cut to 16 bits."""
    if kind == "f16":
        with np.errstate(over="ignore"):
            half = x.astype(np.float16)
        return half.astype(np.float32), half.view(np.uint16)
    bits = (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
    return (bits.astype(np.uint32) << 16).view(np.float32), bits


def _widening() -> Iterator[Known]:
    for kind, wide, relu in itertools.product(("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"), ("f16", "bf16"), ("", ".relu")):
        name = f"cvt.rn{relu}.{wide}x2.{kind}x2"
        bits = 4 if kind == "e2m1" else 8
        codes = np.arange(COUNT) % (1 << width(kind))
        others = codes[::-1]
        halves = [[_widened(int(code), kind, wide, bool(relu)) for code in side] for side in (codes, others)]
        want = np.array(halves[0]) << 16 | np.array(halves[1])
        packed = (codes << bits | others).astype(np.uint32)
        if kind == "e2m1":
            yield _case(name, ["cvt.u8.u32 %c, %a0;", f"{name} %d, %c;"], [packed], want, 32, byte=".reg .b8 %c;")
        else:
            yield _case(name, ["cvt.u16.u32 %h1, %a0;", f"{name} %d, %h1;"], [packed], want, 32)


def _widened(code: int, kind: str, wide: str, relu: bool) -> int:
    """Bits of the 16-bit number of a code; NaN is canonical."""
    sign, size = code >> (width(kind) - 1), code & ((1 << (width(kind) - 1)) - 1)
    if size >= finite_codes(kind) and not (kind == "e5m2" and size == 124):
        return 0x7FFF
    number = np.float32(float(level(size, kind))) if size < finite_codes(kind) else np.float32(np.inf)
    found = int(number.astype(np.float16).view(np.uint16)) if wide == "f16" else int(number.view(np.uint32)) >> 16
    return 0 if relu and sign else sign << 15 | found


def _scales() -> Iterator[Known]:
    values_ = np.array([2.0**e * f for e in (-120, -3, 0, 5, 100) for f in (1, 1.0001, 1.5, 1.9999)], np.float32)
    pairs = np.resize(values_, 32), np.resize(values_[::-1], 32)
    for mode, whole in (("rz", np.floor), ("rp", np.ceil)):
        codes = [whole(np.log2(x.astype(np.float64))).astype(np.int64) + 127 for x in pairs]
        name = f"cvt.{mode}.satfinite.ue8m0x2.f32"
        yield _case(name, [f"{name} %d, %a0, %a1;"], list(map(_bits, pairs)), codes[0] << 8 | codes[1], 16)
    exponents = np.clip(np.arange(COUNT), 1, 254)
    packed = (exponents << 8 | exponents[::-1]).astype(np.uint32)
    code = ["cvt.u16.u32 %h1, %a0;", "cvt.rn.bf16x2.ue8m0x2 %d, %h1;"]
    yield _case("cvt.rn.bf16x2.ue8m0x2", code, [packed], exponents << 23 | exponents[::-1] << 7, 32)


# --- redux ------------------------------------------------------------------------------------------------------------


def reduced(x: Array, largest: bool, absolute: bool, nan: bool) -> int:
    """Bits of the reduction of float32 numbers, as the ISA words it for redux.sync."""
    numbers = [abs(float(v)) if absolute else float(v) for v in x if not np.isnan(v)]
    if not numbers or (nan and len(numbers) < len(x)):
        return 0x7FFFFFFF
    best = (max if largest else min)(numbers, key=lambda v: (v, math.copysign(1, v)))  # +0 is above -0
    return int(np.float32(best).view(np.uint32))


REDUCTIONS = list(itertools.product(("min", "max"), ("", ".abs"), ("", ".NaN")))


def awkward(name: str, rows: int, columns: int) -> Array:
    """Rows with zeros of both signs, NaN, infinities, only NaN, only zeros."""
    source = rng(name)
    x = (source.standard_normal((rows, columns)) * 2.0 ** source.integers(-130, 120, (rows, columns))).astype(
        np.float32
    )
    x[1, :] = np.nan
    x[2, :] = 0.0
    x[2, columns // 2] = -0.0
    x[3, :] = -0.0
    x[3, 1] = 0.0
    x[4, 0] = np.nan
    x[5, 1], x[5, 0] = np.inf, -np.inf
    x[6, :] = -np.abs(x[6, :])
    return x


def _reductions() -> Iterator[Known]:
    for op, absolute, nan in REDUCTIONS:
        name = f"redux.sync.{op}{absolute}{nan}.f32"
        x = awkward(name, COUNT // 32, 32)
        flags = (op == "max", bool(absolute), bool(nan))
        want = np.repeat([reduced(row, *flags) for row in x], 32)
        yield _case(name, [f"{name} %d, %a0, 0xffffffff;"], [_bits(x).ravel()], want, 32)
        some = np.array([reduced(row[:20], *flags) for row in x])
        kept = np.where(np.arange(COUNT) % 32 < 20, np.repeat(some, 32), 7)
        code = [
            "mov.b32 %d, 7;",
            "and.b32 %r1, %me, 31;",
            "setp.lt.u32 %p1, %r1, 20;",
            f"@%p1 {name} %d, %a0, 0xfffff;",
        ]
        yield _case(name + ".some", code, [_bits(x).ravel()], kept, 32)
