"""fp8 on persistent kernels, from their PTX: every element within what the rounding of probabilities explains."""

from __future__ import annotations

import pytest

from cute_attn.emulator import Schedule
from tests.support.cover import needed
from tests.support.fp8_case import CUT, LONG, SMALL, VARIED, Fp8Case
from tests.support.persistent_emulated import TARGETS, Target, assert_cut, name, solve_on
from tests.support.right import families
from tests.support.schedules import in_turn

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(("case", "schedule"), in_turn(needed((*SMALL, *VARIED), besides=(*LONG, *CUT))), ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_fp8(target: Target, case: Fp8Case, schedule: Schedule) -> None:
    assert families(solve_on(target, case, schedule, sms=3)) == [target.kernels]


@pytest.mark.parametrize("case", LONG, ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_many_tiles(target: Target, case: Fp8Case) -> None:
    assert families(solve_on(target, case, Schedule(), sms=1)) == [target.kernels]


@pytest.mark.parametrize(("case", "schedule"), in_turn(CUT), ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_cut_keys(target: Target, case: Fp8Case, schedule: Schedule) -> None:
    """Partial outputs hold the scale of their head; their merge applies what is left."""
    assert_cut(target, solve_on(target, case, schedule, sms=16))
