"""The torch reference as a backend: CPU tensors, and any device where it is asked for by name."""

from __future__ import annotations

from collections.abc import Callable

from cute_attn import reference
from cute_attn.kernels.spec import KernelSpec
from cute_attn.problem import Problem, Settings
from cute_attn.runtime.arch import Arch


def launches(problem: Problem, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """None: torch runs it."""
    return []


def prepare(settings: Settings) -> Callable[[Problem], None]:
    return reference.run
