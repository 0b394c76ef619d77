"""The batch wrappers on CPU tensors, against the formula of every request in fp64 numpy."""

from __future__ import annotations

import pytest

from tests.support.batch_case import SMALL, BatchCase, call, make, random_batch_case
from tests.support.formula import assert_batch_right
from tests.support.matrix import poisoned_memory
from tests.support.right import assert_right


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_batch(case: BatchCase) -> None:
    inputs = make(case)
    with poisoned_memory():
        out, lse = call(case, inputs)
    assert_batch_right(case, inputs, out, lse)
    assert_right(case, inputs, out, lse)


@pytest.mark.parametrize("seed", range(100))
def test_random_batch(seed: int) -> None:
    case = random_batch_case(seed, max_len=90, max_batch=5)
    inputs = make(case)
    with poisoned_memory():
        out, lse = call(case, inputs)
    assert_batch_right(case, inputs, out, lse)
