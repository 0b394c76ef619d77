"""The torch reference as a backend: for CPU tensors, and on any device with backend="reference"."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cute_attn.kernels.host.operands import Runner
from cute_attn.problem import BatchLimits, BatchProblem, DeviceLengths, Lengths, Request, Settings
from cute_attn.reference import attention
from cute_attn.runtime.staging import Staging


class ReferenceRun(Runner):
    """Runs requests or batches by a function, which looks at every one, and at the lengths of one plan."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self.compute = compute

    def __call__(self, problem: Request | BatchProblem) -> None:
        """Computes `out` and `lse`. Returns None: every problem is looked at."""
        self.compute(problem)


def prepare(settings: Settings) -> ReferenceRun:
    """Returns what runs single requests of these settings."""
    return ReferenceRun(attention.run_decode if settings.features.device_lengths else attention.run)


def plan(settings: Settings, lengths: Lengths, limits: BatchLimits, staging: Staging) -> ReferenceRun | None:
    """Returns what computes the requests of a batch one after the other, whose lengths are read on the host."""
    if isinstance(lengths, DeviceLengths):
        return None
    return ReferenceRun(functools.partial(attention.run_batch, lengths=lengths))
