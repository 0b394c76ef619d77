"""Artifact: a compiled kernel as data. It needs no DSL to run, and the emulator takes the same object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Param:
    """One kernel parameter as the cubin declares it. `kind` is "i32", "i64", "f32" or "f64"; offset and size in bytes."""

    name: str
    kind: str
    offset: int
    size: int


@dataclass(frozen=True)
class Artifact:
    """cubin and PTX of one spec for one arch, with everything a launch needs."""

    arch: str
    symbol: str
    cubin: bytes
    ptx: str
    params: tuple[Param, ...]
    block: tuple[int, int, int]
    smem_bytes: int  # dynamic shared memory
    registers: int
    stack_bytes: int
    mma_count: int  # matrix instructions in the PTX
    spec: dict[str, Any]  # KernelSpec.asdict()
