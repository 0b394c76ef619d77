"""tcgen05.ld and st of .32x32b: a thread has a lane of its warp, a register a column. The checks of tensor memory."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import EmulatorError, MemoryFault, PtxError, Race, Uninitialised
from tests.emulator.tcgen05_kernel import Kernel, registers

pytestmark = pytest.mark.emulator

NUMS = [1 << i for i in range(8)]


@pytest.fixture(scope="module")
def image() -> Array:
    words = np.arange(128 * 256, dtype=np.uint32).reshape(1, 128, 256)
    return words * np.uint32(0x10001) ^ np.uint32(0x5A5A0000)


@pytest.mark.parametrize("num", NUMS)
def test_load(image: Array, num: int) -> None:
    code = f"tcgen05.ld.sync.aligned.32x32b.x{num}.b32 {registers(num)}, [%taddr+4];"
    _, found = Kernel(tmem=image, warps=[code], results=num, commit=False).run()
    np.testing.assert_array_equal(found, image[:, :, 4 : 4 + num])


@pytest.mark.parametrize("num", NUMS)
def test_store(image: Array, num: int) -> None:
    load = f"tcgen05.ld.sync.aligned.32x32b.x{num}.b32 {registers(num)}, [%taddr];"
    store = f"tcgen05.st.sync.aligned.32x32b.x{num}.b32 [%taddr+128], {registers(num)};"
    code = [load, "tcgen05.wait::ld.sync.aligned;", store, "tcgen05.wait::st.sync.aligned;"]
    found, _ = Kernel(tmem=image, warps=code, columns=max(num, 4), first=128, commit=False).run()
    expected = image[:, :, 128 : 128 + max(num, 4)].copy()
    expected[:, :, :num] = image[:, :, :num]
    np.testing.assert_array_equal(found, expected)


def _raises(kind: type[EmulatorError], match: str, **options: object) -> None:
    with pytest.raises(kind, match=match):
        Kernel(commit=False, **options).run()  # type: ignore[arg-type]


LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%x0}, "
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%taddr], {%x0};"


def test_each_warp_has_its_lanes(image: Array) -> None:
    _raises(MemoryFault, "which may touch 0..31", tmem=image, warps=[f"{LOAD}[%taddr+{32 << 16}];"])
    _raises(MemoryFault, "at lane 16", tmem=image, warps=[f"{LOAD}[%taddr+{16 << 16}];"])


def test_columns_must_exist_and_be_written(image: Array) -> None:
    _raises(MemoryFault, "which has 512", tmem=image, warps=[f"{LOAD}[%taddr+512];"])
    _raises(Uninitialised, "lane 0 column 300", tmem=image, warps=[f"{LOAD}[%taddr+300];"])


def test_columns_must_be_allocated(image: Array) -> None:
    release = ["tcgen05.wait::ld.sync.aligned;", "bar.sync 0;", "ld.shared.b32 %y, [%slot];", "@!%p0 bra KEPT;"]
    release += ["tcgen05.dealloc.cta_group::1.sync.aligned.b32 %y, 512;", "KEPT: bar.sync 0;"]
    _raises(MemoryFault, "not allocated", tmem=image, warps=[*release, f"{LOAD}[%taddr];"], free=False)


def test_leak(image: Array) -> None:
    _raises(MemoryFault, "without giving 512 columns", tmem=image, free=False)


def test_wrong_size_given_back(image: Array) -> None:
    release = ["ld.shared.b32 %y, [%slot];", "@!%p0 bra KEPT;"]
    release += ["tcgen05.dealloc.cta_group::1.sync.aligned.b32 %y, 256;", "KEPT:"]
    _raises(MemoryFault, "no allocation of that size", tmem=image, warps=release)


def test_stores_are_waited_for(image: Array) -> None:
    _raises(Race, "a write by tcgen05.st", tmem=image, warps=[STORE, f"{LOAD}[%taddr];"])


def test_strictness_is_about_loads(image: Array) -> None:
    code = [f"{LOAD}[%taddr];", STORE.replace("%x0", "%y"), "tcgen05.wait::st.sync.aligned;"]
    _raises(Race, "a read by tcgen05.ld", tmem=image, warps=code)
    Kernel(tmem=image, warps=code, commit=False).run(strict=False)
    waited = [code[0], "tcgen05.wait::ld.sync.aligned;", *code[1:]]
    Kernel(tmem=image, warps=waited, commit=False).run()


def test_register_count(image: Array) -> None:
    _raises(PtxError, "with 2 registers, it has 1", tmem=image, warps=[f"{LOAD}[%taddr];".replace("%x0", "%x0,%x1")])
