"""Compile key of a kernel, and the interface of a kernel to the compile step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


class Program(Protocol):
    """Kernel ready to be traced, as a `ProgramOf` builds it from a spec.

    `scalars` are the kernel's parameters, in order: names and types (`Int32`, `Int64`, `Float32`, `Float64` of
    cutlass). Pointers are passed as `Int64` addresses.
    `kernel` is the `@cute.kernel` method: the compile step names it after `KernelSpec.symbol`. A program that
    launches clusters also has `cluster`, their dimensions in CTAs.
    """

    @property
    def scalars(self) -> Mapping[str, Any]: ...

    @property
    def kernel(self) -> Any: ...

    block: tuple[int, int, int]
    smem_bytes: int

    def compile_args(self) -> tuple[Any, ...]:
        """Returns the arguments for `cute.compile(program, *compile_args())`: Params of zeros, then the grid as three
        Int32.
        """

    def __call__(self, params: Any, grid_x: Any, grid_y: Any, grid_z: Any) -> None:
        """Launches the kernel, as a `@cute.jit` host function."""


@dataclass(frozen=True)
class KernelSpec:
    """Base of all specs, which hold everything that changes the generated code and nothing else. A subclass sets
    `kernel`.
    """

    kernel: ClassVar[str]
    needs_mma: ClassVar[bool] = True

    def asdict(self) -> dict[str, Any]:
        return {"kernel": self.kernel, **dataclasses.asdict(self)}

    def key(self) -> str:
        """Returns the canonical text of the spec, equal for equal specs."""
        return json.dumps(self.asdict(), sort_keys=True, separators=(",", ":"))

    @property
    def symbol(self) -> str:
        """Prefix of the kernel's symbol, which appears in profiles."""
        return f"cute_attn_{self.kernel}"


ProgramOf = Callable[[KernelSpec, str], Program]  # builds the program of a spec for an architecture ("sm_90a", ...)
