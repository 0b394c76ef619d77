"""Compile key of the kernel that computes the lengths of paged requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.runtime.spec import KernelSpec

THREADS = 128


@dataclass(frozen=True)
class LengthsSpec(KernelSpec):
    """Spec of the kernel; there is one."""

    kernel: ClassVar[str] = "lengths"
    needs_mma: ClassVar[bool] = False
