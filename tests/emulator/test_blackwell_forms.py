"""Forms that Blackwell adds: micro-kernels against the bytes that the PTX ISA asks for, under
all schedules, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from cute_attn.emulator import Schedule
from cute_attn.emulator.errors import EmulatorError, MemoryFault, Race, UnknownForm
from tests.emulator.micro import blackwell, emulate
from tests.emulator.micro.blackwell import Known, memory_cases

pytestmark = pytest.mark.emulator

CASES = [pytest.param(known, id=known.id) for known in memory_cases()]


@pytest.mark.parametrize("known", CASES)
def test_the_result_is_that_of_the_isa(known: Known) -> None:
    for seed, kind in enumerate(("eager", "delayed", "adversarial")):
        assert emulate.run(known.case, schedule=Schedule(kind, seed))[: len(known.want)] == known.want, kind


def _refused(known: Known, kind: type[EmulatorError], match: str, **changes: object) -> None:
    with pytest.raises(kind, match=match):
        emulate.run(dataclasses.replace(known.case, **changes))  # type: ignore[arg-type]


def test_wide_stores_of_two_warps_race() -> None:
    known = blackwell.wide("st.global.v8.b32")
    both = known.case.ptx.replace("mad.wide.u32 %rd", "and.b32 %r9, %me, 31;\nmad.wide.u32 %rd").replace(
        "%me, 32,", "%r9, 32,"
    )
    _refused(known, Race, "two warps write one address", ptx=both.replace(".reqntid 32", ".reqntid 64"), threads=64)


def test_wide_stores_are_aligned_to_32_bytes() -> None:
    _refused(blackwell.wide("st.global.v8.b32", offset=16), MemoryFault, "not aligned to 32 bytes")


def test_wide_stores_need_sm_100() -> None:
    known = blackwell.wide("st.global.v8.b32")
    _refused(known, UnknownForm, "does not exist on sm_90", ptx=known.case.ptx.replace("sm_100a", "sm_90a"))
