"""Forms that Blackwell adds: micro-kernels against the bytes that the PTX ISA asks for, under
all schedules, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cute_attn.emulator import Schedule
from cute_attn.emulator.errors import Deadlock, EmulatorError, MemoryFault, ProxyFault, UnknownForm
from tests.emulator.micro import blackwell, emulate
from tests.emulator.micro.blackwell import Known, memory_cases
from tests.emulator.micro.blackwell_values import value_cases

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
