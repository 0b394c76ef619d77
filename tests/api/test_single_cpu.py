"""The single-request functions on CPU tensors, against the formula row by row."""

from __future__ import annotations

import pytest

from tests.support.formula import assert_single_right
from tests.support.matrix import SMALL, Case, call, make, poisoned_memory


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_single(case: Case) -> None:
    inputs = make(case)
    with poisoned_memory():
        out, lse = call(case, inputs)
    assert_single_right(case, inputs, out, lse)
