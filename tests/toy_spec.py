"""Spec of the toy kernel. Importing it does not import the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.spec import KernelSpec, Program


@dataclass(frozen=True)
class ToySpec(KernelSpec):
    kernel: ClassVar[str] = "toy"
    needs_mma: ClassVar[bool] = False
    threads: int = 128
    cluster: tuple[int, int, int] = (1, 1, 1)

    def program(self, arch: str) -> Program:
        from tests.toy_kernel import ToyProgram

        return ToyProgram(self.threads, wait=arch != "sm_80", cluster=self.cluster)
