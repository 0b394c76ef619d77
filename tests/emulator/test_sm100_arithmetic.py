"""Packed float32 arithmetic and conversions of small floats that no golden holds, against forms that goldens hold,
torch, and the numbers of e2m1.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cute_attn.emulator.dtypes import Array
from tests.emulator.micro import emulate
from tests.emulator.micro.blackwell import TARGET, VERSION
from tests.emulator.micro.case import elementwise

pytestmark = pytest.mark.emulator

EDGES = [0.0, -0.0, 1.0, -1.5, 3.4e38, 2.0**-126, -(2.0**-149), 1 + 2.0**-23, 0.1, 6.0, -448.0, 1e-3]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


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


def _samples(count: int) -> Array:
    rng = np.random.default_rng(2)
    wide = rng.standard_normal((96, count)) * 2.0 ** rng.integers(-20, 20, (96, count))
    edges = rng.choice(np.array(EDGES), (96, count))
    return np.concatenate([wide, edges]).astype(np.float32)


PACKED = [*itertools.product(("add", "sub"), ("rn", "rm")), ("mul", "rn"), ("fma", "rn")]


@pytest.mark.parametrize(("op", "mode"), PACKED)
@pytest.mark.filterwarnings("ignore:overflow")
def test_packed(op: str, mode: str) -> None:
    x = _samples(6 if op == "fma" else 4)
    names = [f"%a{i}" for i in range(x.shape[1])]
    packs = " ".join(f"mov.b64 %rd{i}, {{{names[2 * i]}, {names[2 * i + 1]}}};" for i in range(len(names) // 2))
    operands = ", ".join(f"%rd{i}" for i in range(len(names) // 2))
    found = _run(f"{packs} {op}.{mode}.f32x2 %d, {operands};", x, "b64").view(np.float32)
    for half in (0, 1):
        expected = _run(f"{op}.{mode}.f32 %d, {', '.join(names[half::2])};", x, "b32").view(np.float32)[:, 0]
        np.testing.assert_array_equal(found[:, half], expected)


def test_to_e2m1() -> None:
    ties = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    values = np.array([s * v for v in [*E2M1, *ties, *np.abs(EDGES), 0.3, 5.1, 1e9] for s in (1, -1)], np.float32)
    pairs = np.stack([values, np.roll(values, 7)], axis=1)
    found = _run("cvt.rn.satfinite.e2m1x2.f32 %c, %a0, %a1; cvt.u32.u8 %d, %c;", pairs, "b32")[:, 0]
    distances = np.abs(np.minimum(np.abs(pairs), 6.0)[..., None] - np.array(E2M1))
    even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    codes = even_first[distances[..., even_first].argmin(-1)] | np.signbit(pairs) * 8
    np.testing.assert_array_equal(found, codes[:, 0] << 4 | codes[:, 1])


def _numbers(type_: str) -> Array:
    """Of all codes."""
    if type_ == "e2m1":
        return np.array([*E2M1, *(-x for x in E2M1)], np.float32)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[type_]
    return torch.arange(256).to(torch.uint8).view(dtype).float().numpy()


@pytest.mark.parametrize(("type_", "to"), [("e2m1", "f16"), ("e2m1", "bf16"), ("e4m3", "bf16"), ("e5m2", "bf16")])
def test_widen(type_: str, to: str) -> None:
    """Every code, from a float32 that carries it as an integer; NaN is canonical."""
    numbers = _numbers(type_)
    bits = numbers.astype(np.float16).view(np.uint16) if to == "f16" else numbers.view(np.uint32) >> np.uint32(16)
    bits = np.where(np.isnan(numbers), 0x7FFF, bits).astype(np.uint32)
    codes = np.arange(len(numbers))
    source, width = ("cvt.u8.u32 %c, %r0;", 4) if type_ == "e2m1" else ("cvt.u16.u32 %h0, %r0;", 8)
    convert = f"cvt.rn.{to}x2.{type_}x2 %d, {source.split()[1][:-1]};"
    word = (codes << width | codes[::-1])[:, None].astype(np.float32)
    found = _run(f"cvt.rzi.u32.f32 %r0, %a0; {source} {convert}", word, "b32")[:, 0]
    np.testing.assert_array_equal(found, bits << np.uint32(16) | bits[::-1])


def test_three_inputs() -> None:
    x = _samples(3)
    for op, function in (("max", np.max), ("min", np.min)):
        found = _run(f"{op}.f32 %d, %a0, %a1, %a2;", x, "b32").view(np.float32)
        np.testing.assert_array_equal(found[:, 0], function(x, axis=1))
