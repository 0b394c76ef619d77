"""Compile key of the planner kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.runtime.spec import KernelSpec


@dataclass(frozen=True)
class PlanSpec(KernelSpec):
    """Compile key of the kernel that schedules batches; there is one."""

    kernel: ClassVar[str] = "plan"
    needs_mma: ClassVar[bool] = False
