"""Runs requests on a backend, and plans batches for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cute_attn.dispatch import emulator, reference
from cute_attn.dispatch.capabilities import Backend, Load
from cute_attn.dispatch.families import FAMILIES
from cute_attn.dispatch.select import choose, chosen, load_class
from cute_attn.kernels.host import gpu
from cute_attn.kernels.host.family import BatchRunner, KernelFamily, KernelLaunch, RequestRunner
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import Fire
from cute_attn.kernels.host.prepared import prepared
from cute_attn.problem import (
    BatchLengths,
    BatchLimits,
    DeviceLengths,
    Problem,
    Request,
    Settings,
)
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.staging import Staging


class Implementation(Protocol):
    """Interface of every backend: see the functions of this module with the same names."""

    def prepare(self, settings: Settings) -> RequestRunner: ...

    def launches(self, problem: Request, arch: Arch, sms: int) -> list[KernelLaunch]: ...

    def plan(self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging) -> BatchRunner: ...

    def workspace(self, settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]: ...


@dataclass(frozen=True)
class OnGpu:
    """A kernel family on the CUDA device that the settings name."""

    family: KernelFamily

    def prepare(self, settings: Settings) -> RequestRunner:
        """Returns what runs single requests of these settings."""
        return self.family.prepare(settings, _gpu_of(settings))

    def launches(self, problem: Request, arch: Arch, sms: int) -> list[KernelLaunch]:
        """Returns the kernels and grids of `problem`."""
        return self.family.launches(problem, arch, sms)

    def plan(self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging) -> BatchRunner:
        """Returns what runs batches of these settings and lengths."""
        return self.family.plan(settings, lengths, limits, staging, _gpu_of(settings))

    def workspace(self, settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
        """Returns the bytes that a plan uses of a workspace of unlimited size, and the bytes of its records."""
        arch, _, sms = _gpu_of(settings)
        return self.family.workspace(settings, lengths, limits, arch, sms)


def _gpu_of(settings: Settings) -> Gpu:
    return gpu.of_device(settings.features.device.index)


IMPLEMENTATIONS: dict[str, Implementation] = {
    **{name: OnGpu(family) for name, family in FAMILIES.items()},
    "reference": reference,
    "emulator": emulator,
}


def run(problem: Request, backend: str = "auto") -> Fire | None:
    """Computes `out` and `lse` of `problem` on `backend`. Returns what runs requests that differ in addresses, and in
    the number of keys where the host knows it; None where the backend looks at every request.
    """
    if not isinstance(backend, str):
        choose(problem.features, backend)
    load = load_class(problem.features, problem.qo_len, isinstance(problem, Problem))
    return prepared(_runner, problem.settings, backend, load)(problem)


def _runner(settings: Settings, backend: str, load: Load) -> RequestRunner:
    return prepare(chosen(settings.features, backend, load), settings)


def prepare(backend: Backend, settings: Settings) -> RequestRunner:
    """Returns what runs single requests of these settings."""
    return IMPLEMENTATIONS[backend.name].prepare(settings)


def plan(
    backend: Backend, settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging
) -> BatchRunner:
    """Returns what runs batches of these settings and lengths. `staging` copies the plan's records to the
    device.
    """
    return IMPLEMENTATIONS[backend.name].plan(settings, lengths, limits, staging)


def plan_on_device(
    backend: Backend, settings: Settings, lengths: DeviceLengths, limits: BatchLimits, staging: Staging
) -> BatchRunner | None:
    """Returns what runs batches whose lengths the host does not read; None where the backend needs them
    there, for all batches or within these limits.
    """
    if backend.name == "emulator":
        return emulator.plan_on_device(settings, lengths, limits, staging)
    family = FAMILIES.get(backend.name)
    if family is None:
        return None
    return family.plan_on_device(settings, lengths, limits, staging, _gpu_of(settings))


def workspace(backend: Backend, settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
    """Returns the bytes that a plan uses of a workspace of unlimited size, and the bytes of its records."""
    return IMPLEMENTATIONS[backend.name].workspace(settings, lengths, limits)


def launches(backend: Backend, problem: Request, arch: Arch, sms: int) -> list[KernelLaunch]:
    """Returns the kernels and grids of `problem` on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    return IMPLEMENTATIONS[backend.name].launches(problem, arch, sms)
