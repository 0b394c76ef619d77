"""tcgen05.ld and st of every shape against layouts as CUTLASS states them, and the checks of tensor memory.

The PTX ISA shows fragments in figures only, so that the emulator's formulas go back to the same text: slips show here,
misreadings would not. The corpus runs .32x32b.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import EmulatorError, MemoryFault, PtxError, Race, Uninitialised
from tests.emulator.tcgen05_kernel import Kernel, registers
from tests.emulator.umma_oracle import layout

pytestmark = pytest.mark.emulator

SHAPES = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}  # largest repetition
NUMS = [1 << i for i in range(8)]
COLUMNS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 2}  # of one repetition
CASES = [
    (shape, num, packed)
    for (shape, most), num, packed in itertools.product(SHAPES.items(), NUMS, (False, True))
    if num <= most and COLUMNS[shape] * num * (1 + packed) <= 256
]


def oracle(shape: str, num: int) -> tuple[Array, Array]:
    """(lane, 32-bit column) of each thread's registers, from the (thread, bit) -> bit layouts of
    include/cute/atom/copy_traits_sm100.hpp (SM100_TMEM_LOAD_*dp*b*x); a row of bits is one lane."""
    row = {"32x32b": 32, "16x64b": 64, "16x128b": 128, "16x256b": 256, "16x32bx2": 64}[shape] * num
    threads, values = {
        "32x32b": (((32,), (row,)), ((row,), (1,))),
        "16x64b": (((2, 2, 8), (8 * row, 32, row)), ((32, num), (1, 64))),
        "16x128b": (((4, 8), (32, row)), ((32, 2, num), (1, 8 * row, 128))),
        "16x256b": (((4, 8), (64, row)), ((64, 2, num), (1, 8 * row, 256))),
        "16x32bx2": (((16, 2), (row, 32 * num)), ((32 * num,), (1,))),
    }[shape]
    bits = layout(*threads)[:, None] + layout(*values)[None, ::32]
    return bits // row, bits % row // 32


@pytest.fixture(scope="module")
def image() -> Array:
    words = np.arange(128 * 256, dtype=np.uint32).reshape(1, 128, 256)
    return words * np.uint32(0x10001) ^ np.uint32(0x5A5A0000)


def _columns(shape: str, num: int, packed: bool) -> tuple[Array, Array, str]:
    """(lanes, columns [32, registers, 1 or 2], the immediate of .16x32bx2): its halves lie one behind the other."""
    lanes, columns = oracle(shape, num)
    wide = columns[..., None] * (2 if packed else 1) + np.arange(2 if packed else 1)
    split = f", {num * (2 if packed else 1)}" if shape == "16x32bx2" else ""
    return lanes, wide, split


def _bases(shape: str) -> list[int]:
    return [0] if shape == "32x32b" else [0, 16]


@pytest.mark.parametrize(("shape", "num", "packed"), CASES)
def test_load(image: Array, shape: str, num: int, packed: bool) -> None:
    lanes, columns, split = _columns(shape, num, packed)
    count, pack = columns.shape[1], ".pack::16b" if packed else ""
    for base in _bases(shape):
        address = f"[%taddr+{base << 16}]"
        code = f"tcgen05.ld.sync.aligned.{shape}.x{num}{pack}.b32 {registers(count)}, {address}{split};"
        _, found = Kernel(tmem=image, warps=[code], results=count, commit=False).run()
        for warp in range(4):
            words = image[0, 32 * warp + base + lanes[..., None], columns]
            expected = (words[..., 0] & 0xFFFF) | words[..., 1] << np.uint32(16) if packed else words[..., 0]
            np.testing.assert_array_equal(found[0, 32 * warp : 32 * warp + 32], expected)


@pytest.mark.parametrize(("shape", "num", "packed"), [c for c in CASES if c[1] <= 8])
def test_store(image: Array, shape: str, num: int, packed: bool) -> None:
    lanes, columns, split = _columns(shape, num, packed)
    count, unpack = columns.shape[1], ".unpack::16b" if packed else ""
    last = -(-(int(columns.max()) + 1) // 4) * 4
    source = f"tcgen05.ld.sync.aligned.32x32b.x{_power(count)}.b32 {registers(_power(count))}, [%taddr];"
    for base in _bases(shape):
        address = f"[%taddr+{128 + (base << 16)}]"
        store = f"tcgen05.st.sync.aligned.{shape}.x{num}{unpack}.b32 {address}{split}, {registers(count)};"
        code = [source, "tcgen05.wait::ld.sync.aligned;", store, "tcgen05.wait::st.sync.aligned;"]
        found, _ = Kernel(tmem=image, warps=code, columns=last, first=128, commit=False).run()
        for warp in range(4):
            expected = image[0, :, 128 : 128 + last].copy()
            words = image[0, 32 * warp : 32 * warp + 32, :count, None]
            if packed:
                words = np.concatenate([words & 0xFFFF, words >> 16], axis=-1)
            expected[32 * warp + base + lanes[..., None], columns] = words
            rows = slice(32 * warp, 32 * warp + 32)
            np.testing.assert_array_equal(found[0, rows], expected[rows])


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


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
