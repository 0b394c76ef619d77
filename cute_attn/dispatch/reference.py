"""The torch reference as a backend: CPU tensors, and any device where it is asked for by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cute_attn.kernels.host.family import KernelLaunch
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Request, Settings
from cute_attn.reference import attention as reference
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.staging import Staging


def launches(problem: Request, arch: Arch, sms: int) -> list[KernelLaunch]:
    """None: torch runs it."""
    return []


def prepare(settings: Settings) -> Callable[..., None]:
    return reference.run_decode if settings.features.device_lengths else reference.run


def workspace(settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
    """None is used."""
    return 0, 0


def plan(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging
) -> Callable[[BatchProblem], None]:
    """One request after the other, without a workspace."""
    return functools.partial(reference.run_batch, lengths=lengths)
