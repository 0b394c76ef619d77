"""Forms that Blackwell adds: micro-kernels against the bytes that the PTX ISA asks for, under
all schedules, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cute_attn.emulator import Schedule, tensormap
from cute_attn.emulator.errors import Deadlock, EmulatorError, MemoryFault, ProxyFault, Race, UnknownForm
from tests.emulator.micro import blackwell, emulate
from tests.emulator.micro.blackwell import Known, memory_cases
from tests.emulator.micro.blackwell_values import value_cases
from tests.emulator.micro.catalogue import ADDRESS, maps
from tests.emulator.test_goldens import recorded

pytestmark = pytest.mark.emulator

CASES = [pytest.param(known, id=known.id) for known in itertools.chain(memory_cases(), value_cases())]


@pytest.mark.parametrize("known", CASES)
def test_the_result_is_that_of_the_isa(known: Known) -> None:
    for seed, kind in enumerate(("eager", "delayed", "adversarial")):
        assert emulate.run(known.case, schedule=Schedule(kind, seed))[: len(known.want)] == known.want, kind


def _refused(known: Known, kind: type[EmulatorError], match: str, **changes: object) -> None:
    with pytest.raises(kind, match=match):
        emulate.run(dataclasses.replace(known.case, **changes))  # type: ignore[arg-type]


def test_gather4_takes_boxes_of_one_row() -> None:
    known = blackwell.gather("rows", blackwell.tensor(3, box_rows=4), 0, (1, 2, 3, 4))
    _refused(known, MemoryFault, "one row")


def test_scatter4_takes_no_negative_row() -> None:
    known = blackwell.scatter("negative", blackwell.tensor(3, where="out"), 0, (1, 2, -3, 4))
    _refused(known, MemoryFault, "no coordinate may be negative")


def test_gather4_counts_the_bytes_of_all_rows() -> None:
    """A barrier that expects one row's bytes less never completes."""
    known = blackwell.gather("bytes", blackwell.tensor(3), 0, (1, 2, 3, 4))
    _refused(known, Deadlock, "-128 bytes missing", ptx=known.case.ptx.replace("[%r9], 512;", "[%r9], 384;"))


def test_gathered_rows_are_waited_for() -> None:
    known = blackwell.gather("wait", blackwell.tensor(3), 0, (1, 2, 3, 4))
    _refused(known, Race, "a write by TMA load", ptx=known.case.ptx.replace("\n".join(blackwell.WAIT), ""))


def test_scattered_rows_need_a_proxy_fence() -> None:
    known = blackwell.scatter("fence", blackwell.tensor(3, where="out"), 0, (1, 2, 3, 4))
    _refused(known, ProxyFault, "ordinary stores", ptx=known.case.ptx.replace("fence.proxy.async;", ""))


def test_wide_stores_of_two_warps_race() -> None:
    known = blackwell.wide("st.global.v8.b32")
    both = known.case.ptx.replace("mad.wide.u32 %rd", "and.b32 %r9, %me, 31;\nmad.wide.u32 %rd").replace(
        "%me, 32,", "%r9, 32,"
    )
    _refused(known, Race, "two warps write one address", ptx=both.replace(".reqntid 32", ".reqntid 64"), threads=64)


@pytest.mark.parametrize("form", ["ld.global.v8.b32", "st.global.v4.b64", "st.global.v8.b32"])
def test_wide_accesses_are_aligned_to_32_bytes(form: str) -> None:
    for sinks in ((), (1,)) if form.startswith("st") else ((),):
        _refused(blackwell.wide(form, sinks, offset=16), MemoryFault, "not aligned to 32 bytes")


def test_wide_accesses_of_shared_memory_do_not_exist() -> None:
    known = blackwell.wide("ld.v8.b32")
    shared = known.case.ptx.replace("ld.v8.b32", "ld.shared.v8.b32").replace("[%rd1+0]", "[%r6]")
    _refused(known, UnknownForm, "does not know", ptx=shared)


@pytest.mark.parametrize("form", ["ld.global.v8.b32", "st.global.v4.b64"])
def test_wide_accesses_need_sm_100(form: str) -> None:
    known = blackwell.wide(form)
    _refused(known, UnknownForm, "does not exist on sm_90", ptx=known.case.ptx.replace("sm_100a", "sm_90a"))


@pytest.mark.parametrize("space", [".global", ".shared::cta"])
def test_a_changed_map_must_be_acquired(space: str) -> None:
    _refused(blackwell.changed_map("acquire", space, "map", acquire=False), ProxyFault, "was changed")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("elemtype.global.b1024.b32 [%rd4], 10", "elemtype.global.b1024.b32 [%rd4], 14"),
        ("[%rd4], 1, 1;", "[%rd4], 1, 2;"),
        ("swizzle_mode.global.b1024.b32 [%rd4], 3", "swizzle_mode.global.b1024.b32 [%rd4], 4"),
        (f"mov.b64 %rd3, {blackwell.PITCH};", "mov.b64 %rd3, 200;"),
    ],
)
def test_fields_that_are_not_supported(old: str, new: str) -> None:
    known = blackwell.changed_map("fields", ".global", "map")
    assert old in known.case.ptx
    _refused(known, MemoryFault, r"tensormap\.replace of", ptx=known.case.ptx.replace(old, new))


def test_fields_make_the_maps_of_the_driver() -> None:
    """Zeros become, field by field, the bytes that the driver's encoder was recorded to give."""
    compared = 0
    for wanted, row in zip(maps(), recorded("tensor_maps")["rows"], strict=True):
        if wanted.l2:  # no field of tensormap.replace
            continue
        raw = bytes(tensormap.BYTES)
        fields = [("global_address", 0, ADDRESS), ("rank", 0, len(wanted.dims) - 1)]
        fields += [("elemtype", 0, tensormap.DTYPES.index(wanted.dtype)), ("swizzle_mode", 0, wanted.swizzle)]
        fields += [("fill_mode", 0, int(wanted.nan_fill)), *(("box_dim", i, x) for i, x in enumerate(wanted.box))]
        fields += [("global_dim", i, x) for i, x in enumerate(wanted.dims)]
        fields += [("global_stride", i, x) for i, x in enumerate(wanted.strides)]
        for field in fields:
            raw = tensormap.replaced(raw, *field)
        assert raw.hex() == row.tobytes().hex(), wanted
        compared += 1
    assert compared > 20
