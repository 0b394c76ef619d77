"""Specs of the toy kernel. Importing this does not import the DSL."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from cute_attn.runtime.spec import KernelSpec, Program


@dataclass(frozen=True)
class ToySpec(KernelSpec):
    """A compile adds a line to the file `$TOY_LOG`, if set, and takes `$TOY_SECONDS` longer."""

    kernel: ClassVar[str] = "toy"
    needs_mma: ClassVar[bool] = False
    threads: int = 128
    cluster: tuple[int, int, int] = (1, 1, 1)
    stack: bool = False

    def program(self, arch: str) -> Program:
        from tests.support.toy_kernel import ToyProgram

        if "TOY_LOG" in os.environ:
            with open(os.environ["TOY_LOG"], "a") as log:
                log.write(f"{self.threads} {arch}\n")
        time.sleep(float(os.environ.get("TOY_SECONDS", "0")))
        return ToyProgram(self.threads, self.cluster, wait=arch != "sm_80", stack=self.stack)


@dataclass(frozen=True)
class BrokenSpec(ToySpec):
    """A toy that does not trace ("trace") or misdescribes its kernel: "block", or parameters of `toy_kernel`."""

    fault: str = "trace"

    def program(self, arch: str) -> Program:
        from tests.support import toy_kernel

        if self.fault == "trace":
            raise ValueError("toy of iron, not of wood")
        program: Any = super().program(arch)
        if self.fault == "block":
            program.block = (64, 1, 1)
        else:
            program.scalars = get_type_hints(getattr(toy_kernel, self.fault))
        return program


def toy_program(spec: Any, arch: str) -> Program:
    """What a toy spec names."""
    made: Program = spec.program(arch)
    return made
