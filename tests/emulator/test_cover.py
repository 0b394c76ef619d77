"""What `needed` leaves of a matrix has every value of every field, and every pair of features."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from tests.support import batch_case, cover, fp8_case, matrix
from tests.support.cover import needed
from tests.support.persistent_emulated import CUDA

MATRICES = {
    "requests": (matrix.SMALL, functools.partial(batch_case.features, device=CUDA)),
    "batches": (batch_case.SMALL, functools.partial(batch_case.features, device=CUDA)),
    "fp8": (fp8_case.SMALL, functools.partial(fp8_case.Fp8Case.features, device=CUDA)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_nothing_is_lost(name: str) -> None:
    problems, features = MATRICES[name]
    kept = needed(problems, features)
    assert set(kept) < set(problems)
    assert kept == [problem for problem in problems if problem in kept]

    def pairs(problem: Any) -> set[Any]:
        return set(itertools.combinations(features(problem)._replace(num_qo_heads=0, num_kv_heads=0), 2))

    for of in (cover._traits, pairs):
        assert set().union(*map(of, kept)) == set().union(*map(of, problems))
