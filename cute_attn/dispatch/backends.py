"""Runs requests on a backend, and plans batches for it."""

from __future__ import annotations

from typing import Any

from cute_attn.dispatch import emulator, reference
from cute_attn.dispatch.capabilities import Load
from cute_attn.dispatch.families import FAMILIES
from cute_attn.dispatch.select import choose, chosen, load_class
from cute_attn.kernels.host import gpu
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import Fire, Runner
from cute_attn.kernels.host.prepared import prepared
from cute_attn.problem import UNLIMITED, BatchLengths, BatchLimits, Lengths, Request, Settings
from cute_attn.runtime.staging import Staging

OTHERS: dict[str, Any] = {"reference": reference, "emulator": emulator}  # what plays the part of a family on a device


def _gpu_of(settings: Settings) -> Gpu:
    return gpu.of_device(settings.features.device.index)


def run(problem: Request, backend: str = "auto") -> Fire | None:
    """Computes `out` and `lse` of `problem` on `backend`. Returns what runs requests that differ in addresses, and in
    the number of keys where the host knows it; None where the backend looks at every request.
    """
    if not isinstance(backend, str):
        choose(problem.settings.features, backend)
    load = load_class(problem.settings, problem.qo_len)
    return prepared(_runner, problem.settings.unscaled, backend, load)(problem)


def _runner(settings: Settings, backend: str, load: Load) -> Runner:
    name = chosen(settings.features, backend, load).name
    if name in FAMILIES:
        return FAMILIES[name].prepare(settings, _gpu_of(settings))
    runner: Runner = OTHERS[name].prepare(settings)
    return runner


def plan(name: str, settings: Settings, lengths: Lengths, limits: BatchLimits, staging: Staging) -> Runner | None:
    """Returns what runs batches of these settings and lengths on a backend; None: `TiledFamily.plan`."""
    if name in FAMILIES:
        return FAMILIES[name].plan(settings, lengths, limits, staging, _gpu_of(settings))
    runner: Runner | None = OTHERS[name].plan(settings, lengths, limits, staging)
    return runner


def workspace(name: str, settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
    """Returns the most bytes that a plan uses of a workspace of unlimited size, and the bytes of its records."""
    if name == "reference":
        return 0, 0
    if name == "emulator":
        family, on = emulator.emulated_batch(settings, lengths, limits)
    else:
        family, on = FAMILIES[name], _gpu_of(settings)
    limits = limits._replace(workspace_bytes=UNLIMITED)
    schedule = family.schedule(settings, lengths, limits, on.arch, on.sms)
    assert schedule is not None  # of lengths on the host
    return schedule.workspace()
