"""tcgen05.ld.red against the layouts of plain loads and a reduction worked out number by number."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import MemoryFault, UnknownForm
from tests.emulator.micro.blackwell_values import REDUCTIONS, awkward, reduced
from tests.emulator.tcgen05_kernel import Kernel, registers
from tests.emulator.test_tcgen05_ldst import oracle

pytestmark = pytest.mark.emulator

WAIT = "tcgen05.wait::ld.sync.aligned;"


class Kernel103(Kernel):
    """The same for sm_103a, which has these loads."""

    def text(self) -> str:
        return super().text().replace("sm_100a", "sm_103a")


@pytest.fixture(scope="module")
def image() -> Array:
    return awkward("ld.red", 128, 256).view(np.uint32).reshape(1, 128, 256)


def _run(image: Array, shape: str, num: int, op: str, first: int = 0) -> tuple[Array, Array]:
    """(loaded words, reductions) [128, ...]"""
    split = f", {num}" if shape == "16x32bx2" else ""
    load = f"tcgen05.ld.red.sync.aligned.{shape}.x{num}.{op} {registers(num)}, %y, [%taddr+{first}]{split};"
    _, words = Kernel103(tmem=image, warps=[load, WAIT], results=num, commit=False).run()
    code = [load, WAIT, "mov.b32 %x0, %y;"]
    _, found = Kernel103(tmem=image, warps=code, results=1, commit=False).run()
    return words[0], found[0, :, 0]


@pytest.mark.parametrize(("op", "absolute", "nan"), REDUCTIONS)
@pytest.mark.parametrize(("shape", "num"), [("32x32b", 32), ("16x32bx2", 16)])
def test_floats(image: Array, shape: str, num: int, op: str, absolute: str, nan: str) -> None:
    words, found = _run(image, shape, num, f"{op}{absolute}{nan}.f32", first=4)
    lanes, columns = oracle(shape, num)
    for warp in range(4):
        loaded = image[0, 32 * warp + lanes, 4 + columns]
        np.testing.assert_array_equal(words[32 * warp : 32 * warp + 32], loaded)
        want = [reduced(row.view(np.float32), op == "max", bool(absolute), bool(nan)) for row in loaded]
        np.testing.assert_array_equal(found[32 * warp : 32 * warp + 32], want)


@pytest.mark.parametrize("num", [2, 4, 8, 64, 128])
def test_every_repetition(image: Array, num: int) -> None:
    words, found = _run(image, "32x32b", num, "max.f32")
    np.testing.assert_array_equal(words, image[0, :, :num])
    np.testing.assert_array_equal(found, [reduced(row[:num].view(np.float32), True, False, False) for row in image[0]])


@pytest.mark.parametrize(("op", "kind"), list(itertools.product(("min", "max"), ("u32", "s32"))))
def test_integers(image: Array, op: str, kind: str) -> None:
    for form in (f"{op}.{kind}", f"{kind}.{op}"):
        _, found = _run(image, "32x32b", 8, form)
        words = image[0, :, :8].view(np.int32 if kind == "s32" else np.uint32)
        np.testing.assert_array_equal(found.view(words.dtype), getattr(words, op)(axis=1))


def test_odd_columns_are_refused(image: Array) -> None:
    with pytest.raises(MemoryFault, match="odd column"):
        _run(image, "32x32b", 4, "max.f32", first=3)


def test_only_sm_103_has_it(image: Array) -> None:
    load = f"tcgen05.ld.red.sync.aligned.32x32b.x4.max.f32 {registers(4)}, %y, [%taddr];"
    with pytest.raises(UnknownForm, match="does not exist on sm_100"):
        Kernel(tmem=image, warps=[load, WAIT], commit=False).run()
