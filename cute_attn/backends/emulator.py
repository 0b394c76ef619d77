"""CPU tensors on the emulator: the host code of the GPU backends, and their kernels from PTX."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from cute_attn import normalize, select
from cute_attn.emulator import adapter, settings
from cute_attn.errors import ArgumentError
from cute_attn.kernels.spec import KernelSpec
from cute_attn.problem import Problem, Settings
from cute_attn.runtime.arch import TYPICAL_SMS, Arch, named
from cute_attn.runtime.launch import CPU

OUTPUTS = ("out", "lse")


def launches(problem: Problem, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """What the emulated backend launches."""
    return select.emulated(problem.features, arch).launches(problem, arch, sms)


def prepare(problem_settings: Settings) -> Callable[[Problem], None]:
    return Emulated(problem_settings)


class Emulated:
    """Runs problems of the same settings on whatever architecture is emulated at the time of the call."""

    def __init__(self, problem_settings: Settings) -> None:
        self.settings = problem_settings
        self.runners: dict[str, Callable[[Problem], None]] = {}

    def __call__(self, problem: Problem) -> None:
        arch = named(settings.current().arch)
        run = self.runners.get(arch.name)
        if run is None:
            backend = select.emulated(self.settings.features, arch)
            module: Any = importlib.import_module(f"cute_attn.backends.{backend.name}")
            run = self.runners[arch.name] = module.Runner(self.settings, arch, CPU, TYPICAL_SMS[arch.name])
        problem = _placed(problem)
        inputs: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        for name, value in zip(problem._fields, problem, strict=True):
            (outputs if name in OUTPUTS else inputs).update(_tensors(name, value))
        with adapter.visible(inputs, outputs):
            run(problem)


def _placed(problem: Problem) -> Problem:
    """As normalisation leaves a problem on a GPU: q is copied if its rows are not aligned, k and v must be."""
    for name in ("k", "v", "out"):
        if not normalize.aligned(getattr(problem, name)):
            raise ArgumentError(f"{name} must have rows that start at multiples of {normalize.ALIGNMENT} bytes")
    if normalize.aligned(problem.q):
        return problem
    return problem._replace(q=problem.q.clone(memory_format=torch.contiguous_format))


def _tensors(name: str, value: Any) -> dict[str, torch.Tensor]:
    """Tensors of one field of a problem."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, tuple):
        return {f"{name}[{i}]": item for i, item in enumerate(value) if isinstance(item, torch.Tensor)}
    return {}
