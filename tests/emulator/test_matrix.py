"""The matrices of single requests, on everything that can run it, and of batches, on emulated fa2."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support import batch_case, cover, fp8_case
from tests.support.batch_case import BatchCase
from tests.support.cover import needed
from tests.support.executors import AMPERE, PARAMS, Executor
from tests.support.matrix import SMALL
from tests.support.right import assert_solved


def differs_on_ampere(problem: BatchCase) -> bool:
    """Tiles of many rows or wide heads, and numbers of 8 bits, which no instruction converts. Of all others Ampere has
    Hopper's kernels of fa2, but for the two instructions of dependent launches and min.relu.
    """
    rows = problem.rows * problem.num_qo_heads // problem.num_kv_heads
    return problem.kv_dtype is not None or problem.head_dim_qk > 256 or rows > 64


NEEDED = needed((*SMALL, *batch_case.SMALL), batch_case.features)
CASES = [
    pytest.param(problem, *param.values, id=f"{param.id}-{problem.id}", marks=param.marks)
    for param in (*PARAMS, pytest.param(AMPERE, id=AMPERE.name, marks=pytest.mark.emulator))
    for problem in (NEEDED if param.values[0].arch else SMALL)
    if param.values[0] is not AMPERE or (problem.single and differs_on_ampere(problem))
]


@pytest.mark.parametrize(("problem", "on"), CASES)
def test_fa2(problem: BatchCase, on: Executor) -> None:
    with on.active():
        assert_solved(problem, on.device, backend=on.backend)


# --- what `needed` leaves of a matrix --------------------------------------------------------------------------------

MATRICES = {
    "attention": ((*SMALL, *batch_case.SMALL), batch_case.features),
    "fp8": (fp8_case.SMALL, batch_case.features),
}


@pytest.mark.parametrize("name", MATRICES)
def test_nothing_is_lost(name: str) -> None:
    """What is left has every value of every field, and every pair of features."""
    problems, features = MATRICES[name]
    kept = needed(problems, features)
    assert set(kept) < set(problems)
    assert kept == [problem for problem in problems if problem in kept]

    def pairs(problem: Any) -> set[Any]:
        return set(itertools.combinations(features(problem)._replace(num_qo_heads=0, num_kv_heads=0), 2))

    for traits in (cover._traits, pairs):
        assert set().union(*map(traits, kept)) == set().union(*map(traits, problems))
