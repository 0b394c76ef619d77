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


LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%x0}, "
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%taddr], {%x0};"
WAIT = "tcgen05.wait::ld.sync.aligned;"
FIRST_WARP = ("ld.shared.b32 %y, [%slot];", "@!%p0 bra KEPT;")
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %y,"

# name -> (what must be raised, the message, what the warps do)
WRONG: dict[str, tuple[type[EmulatorError], str, list[str]]] = {
    "lanes of another warp": (MemoryFault, r"which may touch 0\.\.31", [f"{LOAD}[%taddr+{32 << 16}];"]),
    "lanes between warps": (MemoryFault, "at lane 16", [f"{LOAD}[%taddr+{16 << 16}];"]),
    "columns that do not exist": (MemoryFault, "which has 512", [f"{LOAD}[%taddr+512];"]),
    "columns that were not written": (Uninitialised, "lane 0 column 300", [f"{LOAD}[%taddr+300];"]),
    "columns that are not allocated": (
        MemoryFault,
        "not allocated",
        [WAIT, "bar.sync 0;", *FIRST_WARP, f"{DEALLOC} 512;", "KEPT: bar.sync 0;", f"{LOAD}[%taddr];"],
    ),
    "a leak": (MemoryFault, "without giving 512 columns", []),
    "another size given back": (MemoryFault, "allocation of that size", [*FIRST_WARP, f"{DEALLOC} 256;", "KEPT:"]),
    "a store that is not waited for": (Race, r"a write by tcgen05\.st", [STORE, f"{LOAD}[%taddr];"]),
    "another number of registers": (
        PtxError,
        "with 2 registers, it has 1",
        [LOAD.replace("%x0", "%x0,%x1") + "[%taddr];"],
    ),
}
KEPT = ("columns that are not allocated", "a leak")  # the kernel itself gives nothing back


@pytest.mark.parametrize("name", WRONG)
def test_wrong(image: Array, name: str) -> None:
    kind, match, warps = WRONG[name]
    with pytest.raises(kind, match=match):
        Kernel(tmem=image, warps=warps, commit=False, free=name not in KEPT).run()


def test_strictness_is_about_loads(image: Array) -> None:
    code = [f"{LOAD}[%taddr];", STORE.replace("%x0", "%y"), "tcgen05.wait::st.sync.aligned;"]
    with pytest.raises(Race, match=r"a read by tcgen05\.ld"):
        Kernel(tmem=image, warps=code, commit=False).run()
    Kernel(tmem=image, warps=code, commit=False).run(strict=False)
    Kernel(tmem=image, warps=[code[0], WAIT, *code[1:]], commit=False).run()
