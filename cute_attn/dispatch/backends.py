"""Runs requests on a backend, and plans batches for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cute_attn.dispatch import emulator, reference
from cute_attn.dispatch.capabilities import Load
from cute_attn.dispatch.families import FAMILIES, KernelFamily
from cute_attn.dispatch.select import choose, chosen, load_class
from cute_attn.kernels.host import gpu
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import Fire, Runner
from cute_attn.kernels.host.prepared import prepared
from cute_attn.problem import (
    BatchLengths,
    BatchLimits,
    DeviceLengths,
    Request,
    Settings,
)
from cute_attn.runtime.staging import Staging


class Implementation(Protocol):
    """Interface of every backend: that of a `KernelFamily` on the device of the settings."""

    def prepare(self, settings: Settings) -> Runner: ...

    def plan(
        self, settings: Settings, lengths: BatchLengths | DeviceLengths, limits: BatchLimits, staging: Staging
    ) -> Runner | None: ...

    def workspace(self, settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]: ...


@dataclass(frozen=True)
class OnGpu:
    """A kernel family on the CUDA device that the settings name."""

    family: KernelFamily

    def prepare(self, settings: Settings) -> Runner:
        return self.family.prepare(settings, _gpu_of(settings))

    def plan(
        self, settings: Settings, lengths: BatchLengths | DeviceLengths, limits: BatchLimits, staging: Staging
    ) -> Runner | None:
        return self.family.plan(settings, lengths, limits, staging, _gpu_of(settings))

    def workspace(self, settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
        arch, _, sms = _gpu_of(settings)
        return self.family.schedule(settings, lengths, limits.unlimited(), arch, sms).workspace()


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
    load = load_class(problem.settings, problem.qo_len)
    return prepared(_runner, problem.settings, backend, load)(problem)


def _runner(settings: Settings, backend: str, load: Load) -> Runner:
    return IMPLEMENTATIONS[chosen(settings.features, backend, load).name].prepare(settings)
