"""CPU tensors on the emulator: the host code of the GPU backends, and their kernels from PTX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cute_attn.dispatch import select
from cute_attn.dispatch.families import FAMILIES
from cute_attn.emulator import adapter, settings
from cute_attn.emulator.errors import LaunchFault
from cute_attn.errors import ArgumentError
from cute_attn.kernels.host.batch import Batches, Repeat, Tensors
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, DecodeProblem, Request, Scratch, Settings
from cute_attn.request import single as single_request
from cute_attn.runtime import counters
from cute_attn.runtime.arch import TYPICAL_SMS, Arch, named
from cute_attn.runtime.launch import CPU
from cute_attn.runtime.spec import KernelSpec
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule

OUTPUTS = ("out", "lse", "workspace")


def launches(problem: Request, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """What the emulated backend launches."""
    family = FAMILIES[select.emulated(problem.features, arch, problem.qo_len).name]
    found: list[tuple[KernelSpec, tuple[int, int, int]]] = family.single.launches(problem, arch, sms)
    return found


def prepare(problem_settings: Settings) -> Callable[[Request], None]:
    return Emulated(problem_settings)


def plan(
    batch_settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging
) -> Callable[[BatchProblem], None]:
    """A plan for the architecture that is emulated now; it runs on that one whatever is emulated later."""
    arch, sms = _machine()
    batches = _batches(batch_settings, arch, batch_schedule.rows_of_a_request(lengths, limits))
    scheduled = batches.scheduled(batch_settings, lengths, limits, arch, sms)
    return EmulatedPlan(batches.planned(batch_settings, scheduled, staging, arch, CPU))


def workspace(batch_settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
    arch, sms = _machine()
    batches = _batches(batch_settings, arch, batch_schedule.rows_of_a_request(lengths, limits))
    return batches.workspace_on(batch_settings, lengths, limits, arch, sms)


def _machine() -> tuple[Arch, int]:
    """The GPU that is stood in for: its architecture and multiprocessors."""
    emulation = settings.current()
    return named(emulation.arch), emulation.sms or TYPICAL_SMS[emulation.arch]


def _batches(batch_settings: Settings, arch: Arch, qo_len: int) -> Batches[Any]:
    backend = select.emulated(batch_settings.features, arch, qo_len)
    found: Batches[Any] = FAMILIES[backend.name].batch.BATCHES
    return found


class Emulated:
    """Runs problems of the same settings on whatever architecture is emulated at the time of the call."""

    def __init__(self, problem_settings: Settings) -> None:
        self.settings = problem_settings
        self.runners: dict[tuple[str, int, str], Callable[[Request], None]] = {}

    def __call__(self, problem: Request) -> None:
        arch, sms = _machine()
        name = select.emulated(self.settings.features, arch, problem.qo_len).name
        run = self.runners.get((arch.name, sms, name))
        if run is None:
            run = self.runners[arch.name, sms, name] = FAMILIES[name].single.Runner(self.settings, arch, CPU, sms)
        problem = _placed(problem)
        with _visible(problem, run):
            run(problem)


class EmulatedPlan:
    """Runs batches of one plan, whose records are global memory too."""

    def __init__(self, planned: Any) -> None:
        self.planned = planned

    def __call__(self, problem: BatchProblem) -> None:
        with _visible(problem, self.planned):
            self.planned(problem)

    def repeat(self, problem: BatchProblem) -> Repeat:
        run = self.planned.repeat(problem)
        names, others = ("q", "k", "v", "out", "lse"), problem._asdict()

        def shown(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            now = BatchProblem(**{**others, **dict(zip(names, tensors, strict=True))})
            with _visible(now, self.planned):
                run(q, k, v, out, lse, tensors)

        return shown


def _placed(problem: Request) -> Request:
    """As normalisation leaves a problem on a GPU: q is copied if its rows are not aligned, k and v must be."""
    for name in ("k", "v", "out"):
        if not single_request.aligned(getattr(problem, name)):
            raise ArgumentError(f"{name} must have rows that start at multiples of {single_request.ALIGNMENT} bytes")
    if single_request.aligned(problem.q):
        return problem
    return problem._replace(q=problem.q.clone(memory_format=torch.contiguous_format))


@contextlib.contextmanager
def _visible(problem: Request | BatchProblem, kept: Any) -> Iterator[None]:
    """The tensors of a problem, the counters, and what a runner or plan keeps on the device: `records`, which launches
    read, and `counters`, which they leave as they found them: at zero.
    """
    inputs, outputs = _roles(problem)
    inputs |= _tensors("records", getattr(kept, "records", None))
    shared = (counters.of_device(CPU, kind).memory for kind in (counters.TICKETS, counters.ARRIVALS))
    memory = [*shared, *_tensors("", getattr(kept, "counters", None)).values()]
    if isinstance(problem, DecodeProblem):
        in_scratch, outputs["partials"] = _scratch(problem.scratch)
        memory.append(in_scratch)
    counted = {f"counters {i}": counter for i, counter in enumerate(memory)}
    try:
        with adapter.visible({**inputs, **counted}, {**outputs, **counted}):
            yield
        for counter in memory:
            if counter.any():
                raise LaunchFault(f"a launch left its counters at {counter.tolist()}")
    finally:
        for counter in memory:
            counter.zero_()  # of a launch that did not come to its end


def _roles(problem: Request | BatchProblem) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors that kernels may only read, and those that they write."""
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    for name, value in zip(problem._fields, problem, strict=True):
        if name != "scratch":
            (outputs if name in OUTPUTS else inputs).update(_tensors(name, value))
    return inputs, outputs


def _scratch(scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """Counters and partial results of a decode call."""
    return (
        _bytes_at(scratch.counter_buffer, scratch.counters, scratch.counter_bytes),
        _bytes_at(scratch.partial_buffer, scratch.partials, scratch.partial_bytes),
    )


def _bytes_at(buffer: torch.Tensor, address: int, num_bytes: int) -> torch.Tensor:
    start = address - buffer.data_ptr()
    return buffer.reshape(-1).view(torch.uint8)[start : start + num_bytes]


def _tensors(name: str, value: Any) -> dict[str, torch.Tensor]:
    """Tensors of one field of a problem."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, tuple):
        return {f"{name}[{i}]": item for i, item in enumerate(value) if isinstance(item, torch.Tensor)}
    return {}
