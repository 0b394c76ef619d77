"""Runs requests on a backend, and plans batches for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cute_attn.dispatch import emulator, reference
from cute_attn.dispatch.capabilities import Backend
from cute_attn.dispatch.families import FAMILIES
from cute_attn.dispatch.select import CACHE_SIZE, choose, chosen, rows_class
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Request, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec

IMPLEMENTATIONS: dict[str, Any] = {
    **{name: family.single for name, family in FAMILIES.items()},
    "reference": reference,
    "emulator": emulator,
}


def run(problem: Request, backend: str = "auto") -> None:
    """Solve `problem` on `backend`, into its `out` and `lse`."""
    if not isinstance(backend, str):
        choose(problem.features, backend)
    _prepared(problem.settings, backend, rows_class(problem.features, problem.qo_len))(problem)


@functools.lru_cache(CACHE_SIZE)
def _prepared(settings: Settings, backend: str, rows: int) -> Callable[[Request], None]:
    return prepare(chosen(settings.features, backend, rows), settings)


def prepare(backend: Backend, settings: Settings) -> Callable[[Request], None]:
    """What runs single requests of these settings."""
    run: Callable[[Request], None] = IMPLEMENTATIONS[backend.name].prepare(settings)
    return run


def plan(
    backend: Backend, settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Any
) -> Callable[[BatchProblem], None]:
    """What runs batches of these settings and lengths. `staging` carries the schedule to the device."""
    run: Callable[[BatchProblem], None] = IMPLEMENTATIONS[backend.name].plan(settings, lengths, limits, staging)
    return run


def workspace(backend: Backend, settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
    """Bytes that a plan of this batch uses of a workspace of any size, and for its records."""
    sizes: tuple[int, int] = IMPLEMENTATIONS[backend.name].workspace(settings, lengths, limits)
    return sizes


def launches(backend: Backend, problem: Request, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """The kernels and grids of `problem` on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    found: list[tuple[KernelSpec, tuple[int, int, int]]] = IMPLEMENTATIONS[backend.name].launches(problem, arch, sms)
    return found
