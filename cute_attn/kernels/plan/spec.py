"""Compile key of the planner kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.runtime.spec import KernelSpec

THREADS = 1024


@dataclass(frozen=True)
class PlanSpec(KernelSpec):
    """Spec of the kernel that schedules batches. `threads`: of its CTA, a multiple of 32 from 256 to 1024."""

    kernel: ClassVar[str] = "plan"
    needs_mma: ClassVar[bool] = False
    threads: int = THREADS


def default_specs() -> list[KernelSpec]:
    """Lists the one kernel that plans launch."""
    return [PlanSpec()]
