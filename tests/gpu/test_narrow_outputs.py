"""Outputs in fp8 on a Hopper GPU."""

from __future__ import annotations

import pytest

from tests.gpu import marks
from tests.support import narrow_outputs
from tests.support.batch_case import BatchCase
from tests.support.case import Case

pytestmark = list(marks.FA3_GPU)


@pytest.mark.parametrize("problem", narrow_outputs.PROBLEMS, ids=str)
def test_rounded_once(problem: Case | BatchCase) -> None:
    narrow_outputs.assert_rounded(problem, "cuda", "fa3")
