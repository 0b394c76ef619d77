"""fa2 and persistent kernels on the same inputs: both right, and as close to each other as two right results are."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu import marks
from tests.support import batch_case, case, cross
from tests.support.batch_case import BatchCase
from tests.support.case import Case
from tests.support.matrix import poisoned_memory
from tests.support.persistent_emulated import Target

RANDOM = int(os.environ.get("CUTE_ATTN_TEST_CROSS", "320"))
FIRST = int(os.environ.get("CUTE_ATTN_TEST_FIRST", "0"))
SEEDS = range(FIRST, FIRST + RANDOM, cross.A_KERNEL)


def solve_batch(target: Target, problem: BatchCase) -> str:
    inputs = batch_case.make(problem, "cuda")
    answers = []
    for backend in cross.backends(target):
        planned = batch_case.wrapper(problem, "cuda", backend=backend)
        arguments = batch_case.plan_arguments(problem, inputs)
        size = max(batch_case.WORKSPACE, planned.workspace_size(**arguments)[0])
        planned.reset_workspace_buffer(torch.empty(size, dtype=torch.uint8, device="cuda"))
        planned.plan(**arguments)
        with poisoned_memory():
            answers.append(batch_case.call(problem, inputs, planned))
        result = batch_case.check(problem, inputs, *answers[-1])
        if not result.ok:
            return f"{backend}: {result.detail}"
    return cross.differences(problem, *answers)


def solve_single(target: Target, problem: Case) -> str:
    inputs = case.make(problem, "cuda")
    answers = []
    for backend in cross.backends(target):
        with poisoned_memory():
            answers.append(case.call(problem, inputs, backend=backend))
        result = case.check(problem, *answers[-1])
        if not result.ok:
            return f"{backend}: {result.detail}"
    return cross.differences(problem, *answers)


@pytest.mark.parametrize("first", SEEDS)
@pytest.mark.parametrize("target", marks.PERSISTENT)
def test_batches(target: Target, first: int) -> None:
    for seed in range(first, first + cross.A_KERNEL):
        problem = cross.batch(target, seed)
        assert not (wrong := solve_batch(target, problem)), f"seed {seed}, {problem}: {wrong}"


@pytest.mark.parametrize("first", SEEDS)
@pytest.mark.parametrize("target", marks.PERSISTENT)
def test_single_requests(target: Target, first: int) -> None:
    for seed in range(first, first + cross.A_KERNEL):
        problem = cross.single(target, seed)
        assert not (wrong := solve_single(target, problem)), f"seed {seed}, {problem}: {wrong}"
