"""fp8 on persistent kernels, from their PTX: every element within what the rounding of probabilities explains. Outputs
in fp8, which are rounded once.
"""

from __future__ import annotations

import pytest

from cute_attn.emulator import Schedule, using
from tests.support import narrow_outputs
from tests.support.batch_case import BatchCase
from tests.support.cover import needed
from tests.support.fp8_case import CUT, LONG, SMALL, VARIED
from tests.support.persistent_emulated import TARGETS, Target, assert_cut, name, solve_on
from tests.support.right import families
from tests.support.schedules import all_alike, in_turn

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(("case", "schedule"), in_turn(needed((*SMALL, *VARIED), besides=(*LONG, *CUT))), ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_fp8(target: Target, case: BatchCase, schedule: Schedule) -> None:
    assert families(solve_on(target, case, schedule, sms=3)) == [target.kernels]


@pytest.mark.parametrize("case", LONG, ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_many_tiles(target: Target, case: BatchCase) -> None:
    assert families(solve_on(target, case, Schedule(), sms=1)) == [target.kernels]


@pytest.mark.parametrize(("case", "schedule"), in_turn(CUT), ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_cut_keys(target: Target, case: BatchCase, schedule: Schedule) -> None:
    """Partial outputs hold the scale of their head; their merge applies what is left."""
    assert_cut(target, solve_on(target, case, schedule, sms=16))


@pytest.mark.parametrize(("problem", "schedule"), in_turn(narrow_outputs.PROBLEMS, structure=all_alike), ids=name)
def test_narrow_outputs_are_rounded_once(problem: BatchCase, schedule: Schedule) -> None:
    """On the wgmma kernels, and by the merge of their partials."""
    with using("sm_90a", kernels="fa3", schedule=schedule, sms=8):
        narrow_outputs.assert_rounded(problem, "cpu", "emulator")
