"""fp8 on the Hopper kernel, from its PTX: every element within what the rounding of probabilities explains."""

from __future__ import annotations

import itertools

import pytest

from cute_attn.emulator import Schedule, using
from tests.support import fp8_case
from tests.support.fp8_case import CUT, LONG, SMALL, VARIED, Fp8Case

pytestmark = pytest.mark.emulator

SCHEDULES = (Schedule(), Schedule("delayed", 1), Schedule("adversarial", 2))


def solve(case: Fp8Case, schedule: Schedule, sms: int) -> list[str]:
    """The kernels that ran."""
    inputs = fp8_case.make(case, "cpu")
    with using("sm_90a", kernels="fa3", schedule=schedule, sms=sms) as emulation:
        out, lse = fp8_case.call(case, inputs, "emulator")
    fp8_case.check(case, inputs, out, lse)
    return [str(record.spec["kernel"]) for record in emulation.records]


@pytest.mark.parametrize(
    ("case", "schedule"),
    list(zip((*SMALL, *VARIED), itertools.cycle(SCHEDULES), strict=False)),
    ids=lambda x: x.id if isinstance(x, Fp8Case) else x.kind,
)
def test_fp8(case: Fp8Case, schedule: Schedule) -> None:
    assert solve(case, schedule, sms=3) == ["fa3"]


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.id)
def test_many_tiles(case: Fp8Case) -> None:
    assert solve(case, SCHEDULES[0], sms=1) == ["fa3"]


@pytest.mark.parametrize(
    ("case", "schedule"),
    list(zip(CUT, SCHEDULES, strict=True)),
    ids=lambda x: x.id if isinstance(x, Fp8Case) else x.kind,
)
def test_cut_keys(case: Fp8Case, schedule: Schedule) -> None:
    """Partial outputs hold the scale of their head; their merge applies what is left."""
    assert solve(case, schedule, sms=16) == ["fa3", "combine"]
