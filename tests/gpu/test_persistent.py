"""Persistent kernels on the GPU that they are made for: the matrices, with NaN around, and the same bits twice."""

from __future__ import annotations

import pytest

from tests.gpu import marks
from tests.support import batch_case, case
from tests.support.batch_case import BatchCase, random_batch_case
from tests.support.case import Case
from tests.support.matrix import FULL, random_case
from tests.support.persistent_emulated import BATCHES, CUDA, GATHERED, LONG, Target, name
from tests.support.right import assert_solved_again

pytestmark = pytest.mark.gpu

RANDOM, CHUNK = 200, 20  # random cases, and those of one test


@pytest.mark.parametrize("problem", [*FULL, *LONG], ids=name)
@pytest.mark.parametrize("target", marks.PERSISTENT)
def test_single(target: Target, problem: Case) -> None:
    if not target.takes(case.features(problem, CUDA)):
        pytest.skip(f"{target.kernels} refuses it")
    assert_solved_again(problem, target.kernels)


@pytest.mark.parametrize("batch", [*batch_case.SMALL, *BATCHES, *GATHERED], ids=name)
@pytest.mark.parametrize("target", marks.PERSISTENT)
def test_batch(target: Target, batch: BatchCase) -> None:
    if not target.takes(batch_case.features(batch, CUDA)):
        pytest.skip(f"{target.kernels} refuses it")
    assert_solved_again(batch, target.kernels)


@pytest.mark.parametrize("first", range(0, RANDOM, CHUNK))
@pytest.mark.parametrize("target", marks.PERSISTENT)
def test_random(target: Target, first: int) -> None:
    """Single requests and batches; those that the target refuses are passed over."""
    for seed in range(first, first + CHUNK):
        single, batch = random_case(seed), random_batch_case(seed)
        if target.takes(case.features(single, CUDA)):
            assert_solved_again(single, target.kernels)
        if target.takes(batch_case.features(batch, CUDA)):
            assert_solved_again(batch, target.kernels)
