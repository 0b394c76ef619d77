"""Cases of every kind: planned, solved by any backend, compared with the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cute_attn.dispatch.reference import ReferenceRun
from cute_attn.emulator import Schedule, using
from cute_attn.emulator.settings import Emulation
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem
from tests.support import batch_case
from tests.support.batch_case import BatchCase, BatchInputs
from tests.support.case import poisoned_memory
from tests.support.formula import check

Pair = tuple[torch.Tensor, torch.Tensor | None]


class Solver:
    """A case on a device, and what runs it: a planned wrapper, or the function of single requests."""

    def __init__(self, problem: BatchCase, device: torch.device | str = "cpu", **arguments: Any) -> None:
        """`arguments`: those of the wrapper, or of the call. A split size of its own gets the workspace it needs."""
        self.problem, self.arguments, self.wrapper = problem, arguments, None
        self.inputs = batch_case.make(problem, device)
        if problem.single:
            return
        self.arguments, self.wrapper = {}, batch_case.wrapper(problem, device, **arguments)
        if problem.fixed_split_size is not None:  # refused if it does not fit
            size = self.wrapper.workspace_size(**batch_case.plan_arguments(problem, self.inputs))[0]
            workspace = torch.empty(max(batch_case.WORKSPACE, size), dtype=torch.uint8, device=device)
            self.wrapper.reset_workspace_buffer(workspace)
        self.plan()

    def plan(self) -> None:
        if self.wrapper is not None:
            self.wrapper.plan(**batch_case.plan_arguments(self.problem, self.inputs))

    def call(self, **extra: Any) -> Pair:
        return batch_case.call(self.problem, self.inputs, self.wrapper, **self.arguments, **extra)

    def assert_right(self) -> Pair:
        """Call and compare; the results."""
        results = self.call()
        assert_right(self.problem, self.inputs, *results)
        return results


def planned(case: BatchCase, device: str = "cpu", **arguments: Any) -> tuple[Any, BatchInputs]:
    """A wrapper with the plan of a case, and the case's inputs."""
    solver = Solver(case, device, **arguments)
    return solver.wrapper, solver.inputs


def assert_right(problem: BatchCase, inputs: BatchInputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fail with the case, and with what of its result is wrong first."""
    wrong = check(problem, inputs, out, lse)
    assert not wrong, f"{problem}: {wrong}"


def assert_solved(problem: BatchCase, device: torch.device | str = "cpu", *, backend: str, **arguments: Any) -> None:
    Solver(problem, device, backend=backend, **arguments).assert_right()


def assert_planned_right(batch: BatchCase, wrapper: Any) -> Pair:
    """Plan a batch with a wrapper, run it and compare; the results."""
    inputs = batch_case.make(batch)
    wrapper.plan(**batch_case.plan_arguments(batch, inputs))
    results = batch_case.call(batch, inputs, wrapper)
    assert_right(batch, inputs, *results)
    return results


def assert_solved_again(problem: BatchCase, backend: str, device: str = "cuda") -> None:
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
    problem: BatchCase,
    arch: str,
    kernels: str = "auto",
    schedule: Schedule | None = None,
    sms: int | None = None,
) -> Emulation:
    """Solve a case on an emulated GPU. What ran, if anything, is the named kernel, and the merge of its partials."""
    with using(arch, kernels=kernels, schedule=schedule, sms=sms) as emulation:
        assert_solved(problem, backend="emulator")
    assert kernels == "auto" or set(families(emulation)) <= {kernels, "combine"}
    return emulation


def emulate_call(
    function: Callable[..., Any],
    *tensors: torch.Tensor,
    on: tuple[str, str],
    schedule: Schedule | None = None,
    sms: int | None = None,
    near: float = 2e-3,
    lse_near: float = 1e-3,
    **options: Any,
) -> Emulation:
    """Compare out and lse of a call on (kernels, arch) with the reference's, NaN where that has it. Where it has an
    infinite lse kernels have NaN: they subtract an infinite maximum from itself.
    """
    with using(on[1], kernels=on[0], schedule=schedule, sms=sms) as emulation:
        out, lse = function(*tensors, return_lse=True, backend="emulator", **options)
    expected, expected_lse = function(*tensors, return_lse=True, backend="reference", **options)
    expected_lse[expected_lse == torch.inf] = torch.nan
    torch.testing.assert_close(out, expected, rtol=near, atol=near, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, rtol=lse_near, atol=lse_near, equal_nan=True)
    return emulation


def launched(emulation: Emulation, first: int = 0) -> list[Any]:
    """The records of launches that compute, from number `first` on: not of the planner, nor merges of nothing."""

    def computes(kernel: str, forms: Iterable[str]) -> bool:
        merges = any(form.startswith("ex2") for form in forms)  # of the weights of partial results
        return merges if kernel == "combine" else kernel not in ("plan", "lengths")

    return [x for x in emulation.records[first:] if computes(x.spec["kernel"], x.stats.instructions)]


def families(emulation: Emulation) -> list[str]:
    """The kernels' families, in the order of the launches that compute."""
    return [str(record.spec["kernel"]) for record in launched(emulation)]


def executed(emulation: Emulation, *forms: str) -> int:
    """The number of executed instructions whose opcodes begin so."""
    counts = [count for record in emulation.records for count in record.stats.instructions.items()]
    return sum(count for form, count in counts if form.startswith(forms))


# ---- without the wrappers' checks


@dataclass(frozen=True)
class Built:
    """A batch in the form that backends receive."""

    problem: BatchProblem
    lengths: BatchLengths
    limits: BatchLimits


def build(case: BatchCase) -> Built:
    """The problem that a backend gets for `case`."""
    inputs, seen = batch_case.make(case), list[BatchProblem]()
    made = batch_case.wrapper(case, backend="reference")
    made.plan(**batch_case.plan_arguments(case, inputs))
    plan = made._planned()
    plan.launch = ReferenceRun(seen.append)
    batch_case.call(case, inputs, made)
    (problem,) = seen
    return Built(problem, plan.lengths.host, plan.limits)
