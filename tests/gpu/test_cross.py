"""fa2 and persistent kernels on the same inputs: both right, and as close to each other as two right results are."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.gpu import marks
from tests.support import cross
from tests.support.batch_case import BatchCase
from tests.support.case import Case, poisoned_memory
from tests.support.persistent_emulated import Target
from tests.support.right import Solver

RANDOM = int(os.environ.get("CUTE_ATTN_TEST_CROSS", "320"))
FIRST = int(os.environ.get("CUTE_ATTN_TEST_FIRST", "0"))
SEEDS = range(FIRST, FIRST + RANDOM, cross.A_KERNEL)


@pytest.mark.parametrize("draw", [cross.batch, cross.single], ids=["batch", "single"])
@pytest.mark.parametrize("first", SEEDS)
@pytest.mark.parametrize("target", marks.PERSISTENT)
def test_backends_agree(target: Target, first: int, draw: Callable[..., Case | BatchCase]) -> None:
    for seed in range(first, first + cross.A_KERNEL):
        problem, answers = draw(target, seed), []
        for backend in cross.backends(target):
            with poisoned_memory():
                answers.append(Solver(problem, "cuda", backend=backend).assert_right())
        assert cross.differences(problem, *answers) == "", f"seed {seed}, {problem}"
