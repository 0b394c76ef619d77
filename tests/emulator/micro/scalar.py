"""Arithmetic, bits, conversions and approximations: one thread per item."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cute_attn.emulator.isa.registry import expand
from tests.emulator.micro.case import Case, elementwise, rng, values

_INTS, _HALVES = "{.s16|.u16|.s32|.u32|.s64|.u64}", "{.f16x2|.bf16x2}"
_TO_INTS = "{.rni|.rzi|.rmi|.rpi}"
# (family, opcodes, number of sources): of the type that the opcode ends with, of conversions from it to the one before.
FORMS = (
    ("integer", f"{{add|sub|mul.lo|min|max}}{_INTS}", 2),
    ("integer", f"mad.lo{_INTS}", 3),
    ("integer", "mul.hi{.s32|.u32}", 2),
    ("integer", "{neg|abs}{.s32|.s64}", 1),
    ("integer", "{min|max}.relu.s32", 2),
    ("bits", "{and|or|xor}{.b16|.b32|.b64}", 2),
    ("bits", "{not.b32|not.b64|clz.b32|popc.b32|bfind.u32}", 1),
    ("bits", "prmt.b32", 3),
    ("float32", "{add|sub}{.rn|.rm}.f32", 2),
    ("float32", "{add.rn.ftz|mul.rn|mul.rn.ftz|add.rn.sat|mul.rn.sat}.f32", 2),
    ("float32", "{min|max|min.NaN|max.NaN|max.ftz|copysign|div.rn}.f32", 2),
    ("float32", "fma.rn{|.ftz}.f32", 3),
    ("float32", "{neg|abs|rcp.rn|sqrt.rn}.f32", 1),
    ("float64", "{add|sub|mul|min|max|div.rn}.f64", 2),
    ("half2", f"{{add.rn|mul.rn|sub.rn|min|max|min.NaN|max.NaN}}{_HALVES}", 2),
    ("half2", f"fma.rn{_HALVES}", 3),
    ("half2", f"{{neg|abs}}{_HALVES}", 1),
    ("convert", "cvt{.s32.s8|.u32.u8|.s64.s32|.u64.u32|.u32.u64|.s16.s32|.u16.u32|.s32.s16|.f64.f32}", 1),
    ("convert", "cvt.rn.f32{.s32|.u32|.f64}", 1),
    ("convert", "cvt.rn{.f64.s32|.f64.u32|.f64.s64|.f64.u64|.f32.s64|.f32.u64}", 1),
    ("convert", f"cvt{_TO_INTS}{{.s32|.u32|.s64|.u64|.f32}}.f32", 1),
    ("convert", f"cvt.rn{_HALVES}.f32", 2),
    ("convert", "cvt.rn{.f16|.bf16}.f32", 1),
)
UNITS = {"f32": "f4", "f64": "f8", "f16": "f2", "f16x2": "f2", "bf16": "bf2", "bf16x2": "bf2"}
IN_REGISTERS = {"s8": "s16", "u8": "u16"}


def cases() -> Iterator[Case]:
    for family, template, count in FORMS:
        for op, _ in expand(template):
            *_, before, source = op.split(".")
            to = before if op.startswith("cvt") else source
            kinds = (IN_REGISTERS.get(source, source),) * count
            yield _simple(family, op, kinds, IN_REGISTERS.get(to, to), unit=UNITS.get(to, ""))
    yield from _integer()
    yield from _bits()
    yield from _predicates()
    yield _cancelling()
    yield from _small_formats()
    yield from _approximations()


def _simple(family: str, op: str, sources: tuple[str, ...], result: str, **more: object) -> Case:
    inputs = ", ".join(f"%a{i}" for i in range(len(sources)))
    return elementwise(family, op, [f"{op} %d, {inputs};"], sources, result, **more)  # type: ignore[arg-type]


def _integer() -> Iterator[Case]:
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
        nonzero = [values(kind, 512, rng(f"div.{kind}.{i}")) for i in range(2)]
        nonzero[1][nonzero[1] == 0] = 3
        for op in ("div", "rem"):
            pair = [x.copy() for x in nonzero]
            if kind[0] == "s":  # the overflow of min / -1 is not defined
                pair[1][pair[1] == np.iinfo(pair[1].dtype).max] = 5
            yield _simple("integer", f"{op}.{kind}", (kind, kind), kind, data=pair)
    for kind, wide in (("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64")):
        yield _simple("integer", f"mul.wide.{kind}", (kind, kind), wide)
        yield _simple("integer", f"mad.wide.{kind}", (kind, kind, wide), wide)


def _bits() -> Iterator[Case]:
    for op in ("shl.b32", "shr.u32", "shr.s32", "shl.b64", "shr.u64", "shr.s64", "shl.b16", "shr.s16"):
        kind = op.split(".")[1]
        counts = rng(op).integers(0, 80, 512).astype(np.uint32)
        yield _simple("bits", op, (kind, "u32"), kind, data=[values(kind, 512, rng(op + "a")), counts])
    for op in ("shf.l.wrap.b32", "shf.r.wrap.b32", "shf.l.clamp.b32", "shf.r.clamp.b32"):
        counts = rng(op).integers(0, 70, 512).astype(np.uint32)
        data = [values("b32", 512, rng(op + str(i))) for i in range(2)]
        yield _simple("bits", op, ("b32", "b32", "u32"), "b32", data=[*data, counts])
    for table in (0x96, 0xE8, 0x1B, 0xF8, 0x2D):
        code = [f"lop3.b32 %d, %a0, %a1, %a2, {table};"]
        yield elementwise("bits", f"lop3.{table:#x}", code, ("b32", "b32", "b32"), "b32")


def _predicates() -> Iterator[Case]:
    for kind, compares in (
        ("s32", "eq ne lt le gt ge"),
        ("u32", "eq ne lt le gt ge lo ls hi hs"),
        ("s64", "lt ge"),
        ("f32", "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"),
        ("f64", "lt ge neu"),
    ):
        for compare in compares.split():
            code = [f"setp.{compare}.{kind} %p1, %a0, %a1;", "selp.b32 %d, 1, 0, %p1;"]
            pair = [values(kind, 512, rng(f"{compare}.{kind}.{i}")) for i in range(2)]
            pair[1][::5] = pair[0][::5]
            yield elementwise("predicate", f"setp.{compare}.{kind}", code, (kind, kind), "b32", data=pair)
    code = [
        "setp.lt.s32 %p1, %a0, %a1;",
        "setp.gt.and.s32 %p2|%p3, %a0, 5, %p1;",
        "selp.b32 %r1, 1, 0, %p2;",
        "selp.b32 %r2, 2, 0, %p3;",
        "or.b32 %d, %r1, %r2;",
    ]
    yield elementwise("predicate", "setp.and", code, ("s32", "s32"), "b32")


def _cancelling() -> Case:
    """Sums of products and nearly their negatives."""
    close = [values("f32", 512, rng(f"fma.close.{i}")) for i in range(2)]
    exact = close[0].view(np.float32).astype(np.float64) * close[1].view(np.float32)
    product = -np.clip(exact, -3e38, 3e38).astype(np.float32)
    code, data = ["fma.rn.f32 %d, %a0, %a1, %a2;"], [*close, product.view(np.uint32)]
    return elementwise("float32", "fma.rn.f32.cancel", code, ("f32",) * 3, "f32", unit="f4", data=data)


def _small_formats() -> Iterator[Case]:
    codes = np.arange(1024, dtype=np.uint16) * np.uint16(64) + np.uint16(7)
    for kind in ("f16", "bf16"):
        yield _simple("convert", f"cvt.f32.{kind}", ("b16",), "f32", unit="f4", data=[codes], count=1024)
    pairs = (np.arange(256, dtype=np.uint16) << np.uint16(8)) | np.arange(255, -1, -1, dtype=np.uint16)
    for kind in ("e4m3x2", "e5m2x2"):
        yield _simple("fp8", f"cvt.rn.f16x2.{kind}", ("b16",), "b32", unit="f2", data=[pairs], count=256)
        near = _near_codes(kind, 1024)
        yield _simple("fp8", f"cvt.rn.satfinite.{kind}.f32", ("f32", "f32"), "b16", count=1024, data=near)
        yield _simple("fp8", f"cvt.rn.satfinite.{kind}.f16x2", ("f16x2",), "b16", count=1024)


def _near_codes(kind: str, count: int) -> list[np.ndarray]:  # type: ignore[type-arg]
    """Numbers at, between and just beside representable ones."""
    mantissa = 3 if kind == "e4m3x2" else 2
    source = rng(kind)
    found = []
    for _ in range(2):
        exponents = source.integers(-20, 20, count)
        steps = source.integers(0, 1 << (mantissa + 1), count)
        nudges = source.integers(-1, 2, count) * 2.0**-12
        numbers = (1 + steps / (1 << (mantissa + 1)) + nudges) * 2.0**exponents * source.choice([-1.0, 1.0], count)
        bits = numbers.astype(np.float32).view(np.uint32)
        bits[:64] = values("f32", 64, source)
        found.append(bits)
    return found


def _approximations() -> Iterator[Case]:
    """The bounds of the ISA: 2 ulp for ex2, 1 for rcp, and so on; where it gives an absolute error, in units of it."""
    source = rng("approx")
    moderate = (source.standard_normal(512) * 8).astype(np.float32)
    positive = (np.abs(source.standard_normal(512)) * 2.0 ** source.integers(-30, 30, 512)).astype(np.float32)
    small = source.uniform(-3.1, 3.1, 512).astype(np.float32)
    for op, data, ulps in (
        ("ex2.approx.ftz.f32", moderate, 2),
        ("ex2.approx.f32", moderate, 2),
        ("rcp.approx.ftz.f32", positive, 1),
        ("rcp.approx.f32", positive, 1),
        ("sqrt.approx.ftz.f32", positive, 2),
        ("rsqrt.approx.ftz.f32", positive, 2),
    ):
        yield _simple("approx", op, ("f32",), "f32", unit="f4", ulps=ulps, data=[data.view(np.uint32)])
    # lg2: 2^-22 of absolute error; tanh: 2^-11 relative; sin, cos: 2^-20.5 absolute: compared as such by `absolute`
    for op, data in (
        ("lg2.approx.ftz.f32", positive),
        ("tanh.approx.f32", moderate),
        ("sin.approx.ftz.f32", small),
        ("cos.approx.ftz.f32", small),
    ):
        yield _simple("approx", op, ("f32",), "f32", unit=f"near:{op.split('.')[0]}", data=[data.view(np.uint32)])
    pair = [moderate.view(np.uint32), positive.view(np.uint32)]
    yield _simple("approx", "div.full.f32", ("f32", "f32"), "f32", unit="f4", ulps=2, data=pair)
