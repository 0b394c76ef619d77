"""Single requests and batches on CPU tensors, against the formula in fp64."""

from __future__ import annotations

import pytest

from tests.support import batch_case, matrix
from tests.support.batch_case import BatchCase, random_batch_case
from tests.support.case import Case, poisoned_memory
from tests.support.formula import assert_batch_right, assert_single_right
from tests.support.right import Solver


def solved(problem: Case | BatchCase) -> Solver:
    solver = Solver(problem)
    with poisoned_memory():
        out, lse = solver.call()
    (assert_batch_right if solver.batch else assert_single_right)(problem, solver.inputs, out, lse)
    return solver


@pytest.mark.parametrize("problem", [*matrix.SMALL, *batch_case.SMALL], ids=lambda problem: problem.id)
def test_small(problem: Case | BatchCase) -> None:
    """The verdict that kernels get accepts the reference's results, too."""
    solved(problem).assert_right()


@pytest.mark.parametrize("seed", range(100))
def test_random_batch(seed: int) -> None:
    solved(random_batch_case(seed, max_len=90, max_batch=5))
