"""Threads: runs of one plan side by side, and one wrapper per thread."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from cute_attn.kernels.host.batch import BatchRun, Launched, Memory
from cute_attn.problem import BatchProblem
from cute_attn.runtime.launch import CPU
from tests.support.batch_case import heads, make, plan_arguments, wrapper
from tests.support.graphs import sliced
from tests.support.threads import in_threads
from tests.wrappers.kinds import IDS, KINDS, plan_and_run, run

THREADS, ROUNDS = 8, 6


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_runs_of_one_plan(case: Any) -> None:
    """Each thread has scales and heads of its own; the first run of each is prepared while others run."""
    inputs, made = make(case), wrapper(case)
    fewer = [(4, 2), (2, 2), (4, 1), (2, 1)]
    for _ in range(3):
        made.plan(**plan_arguments(case, inputs))

        def work(i: int) -> None:
            layer = dataclasses.replace(case, k_scale=1 + i / 4, **heads(*fewer[i % 4]))
            tensors = sliced(inputs, *fewer[i % 4])
            for _ in range(ROUNDS):
                run(layer, tensors, made)

        in_threads(work, range(THREADS))


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_a_wrapper_per_thread(case: Any) -> None:
    def work(i: int) -> None:
        made = wrapper(case)
        for seed in range(ROUNDS):
            mine = dataclasses.replace(case, seed=seed * THREADS + i, sm_scale=0.1 + i / 10)
            plan_and_run(mine, made)

    in_threads(work, range(THREADS))


def test_a_launch_gets_the_kernel_of_its_own_settings() -> None:
    """Two attributes, read one after the other, could belong to two runs."""
    fired: list[tuple[Any, Any]] = []

    class Run(BatchRun):
        def kernel(self, settings: Any) -> Any:
            launch = types.SimpleNamespace(fire=lambda *given: fired.append((settings, *given[2][1])))
            return types.SimpleNamespace(
                attention=types.SimpleNamespace(of=lambda roles: launch),
                **dict.fromkeys(("combine", "counter")),
                strides=lambda q, *others: (f"of thread {int(q)}",),
                scales=lambda settings: (),
                addresses=lambda *tensors: lambda places: places,
            )

        def decided(self, memory: Memory) -> Launched:
            return Launched(self.version, memory, (1, 1, 1), (), (0, 1, 1), (), ())

    run = Run("planned", types.SimpleNamespace(device_index=CPU))  # type: ignore[arg-type]

    def work(i: int) -> None:
        for _ in range(400):
            run(BatchProblem(f"of thread {i}", torch.tensor([i]), *(torch.zeros(1, 1),) * 3, None))  # type: ignore[arg-type]

    in_threads(work, range(THREADS))
    assert len(fired) == 400 * THREADS
    assert all(prepared_for == packed for prepared_for, packed in fired)
