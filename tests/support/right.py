"""Cases, single requests and batches alike: planned, solved by any backend, compared with the fp64 reference."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.emulator import Schedule, using
from cute_attn.emulator.settings import Emulation
from tests.support import batch_case, case
from tests.support.batch_case import BatchCase, BatchInputs
from tests.support.case import Case, poisoned_memory

Pair = tuple[torch.Tensor, torch.Tensor | None]


class Solver:
    """A case on a device, and what runs it: a planned wrapper, or the function of single requests."""

    def __init__(self, problem: Case | BatchCase, device: torch.device | str = "cpu", **arguments: Any) -> None:
        """`arguments`: those of the wrapper, or of the call. A split size of its own gets the workspace it needs."""
        self.problem, self.arguments = problem, arguments
        self.batch = isinstance(problem, BatchCase)
        self.inputs = (batch_case if self.batch else case).make(problem, device)
        if not self.batch:
            return
        self.wrapper = batch_case.wrapper(problem, device, **arguments)
        if problem.fixed_split_size is not None:  # refused if it does not fit
            size = self.wrapper.workspace_size(**batch_case.plan_arguments(problem, self.inputs))[0]
            workspace = torch.empty(max(batch_case.WORKSPACE, size), dtype=torch.uint8, device=device)
            self.wrapper.reset_workspace_buffer(workspace)
        self.plan()

    def plan(self) -> None:
        if self.batch:
            self.wrapper.plan(**batch_case.plan_arguments(self.problem, self.inputs))

    def call(self) -> Pair:
        if self.batch:
            return batch_case.call(self.problem, self.inputs, self.wrapper)
        return case.call(self.problem, self.inputs, **self.arguments)

    def assert_right(self) -> Pair:
        """Call and compare; the results."""
        results = self.call()
        assert_right(self.problem, self.inputs, *results)
        return results


def planned(case: BatchCase, device: str = "cpu", **arguments: Any) -> tuple[Any, BatchInputs]:
    """A wrapper with the plan of a case, and the case's inputs."""
    solver = Solver(case, device, **arguments)
    return solver.wrapper, solver.inputs


def assert_right(problem: Case | BatchCase, inputs: Any, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fail with the case, and with what of its result is wrong first."""
    outputs = (inputs, out, lse) if isinstance(problem, BatchCase) else (out, lse)
    result = (batch_case if isinstance(problem, BatchCase) else case).check(problem, *outputs)
    assert result.ok, f"{problem}: {result.detail}"


def assert_solved(problem: Case | BatchCase, device: torch.device | str = "cpu", **arguments: Any) -> None:
    Solver(problem, device, **arguments).assert_right()


def assert_planned_right(batch: BatchCase, wrapper: Any) -> Pair:
    """Plan a batch with a wrapper, run it and compare; the results."""
    inputs = batch_case.make(batch)
    wrapper.plan(**batch_case.plan_arguments(batch, inputs))
    results = batch_case.call(batch, inputs, wrapper)
    assert_right(batch, inputs, *results)
    return results


def assert_solved_again(problem: Case | BatchCase, backend: str, device: str = "cuda") -> None:
    """Right with NaN in every unwritten byte, and bitwise equal in a second run and after a second plan."""
    solver = Solver(problem, device, backend=backend)
    with poisoned_memory():
        out, lse = solver.call()
    assert_right(solver.problem, solver.inputs, out, lse)
    for repeat in (lambda: None, solver.plan):
        repeat()
        second, second_lse = solver.call()
        assert torch.equal(second, out)
        assert lse is None or torch.equal(second_lse, lse)


def emulate(
    problem: Case | BatchCase,
    arch: str,
    kernels: str = "auto",
    schedule: Schedule | None = None,
    sms: int | None = None,
) -> Emulation:
    """Solve a case on an emulated GPU. What ran, if anything, is the named kernel, and the merge of its partials."""
    with using(arch, kernels=kernels, schedule=schedule, sms=sms) as emulation:
        assert_solved(problem, backend="emulator")
    assert kernels == "auto" or {record.spec["kernel"] for record in emulation.records} <= {kernels, "combine"}
    return emulation
