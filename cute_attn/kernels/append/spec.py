"""Compile key of the kernels that append to paged caches, and the default specs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.runtime.spec import KernelSpec

COPY, NVFP4 = "copy", "nvfp4"
BLOCK = 16  # elements that a thread quantises: those that share a scale of NVFP4
VECTOR = 16  # bytes of the widest access
THREADS = 128


@dataclass(frozen=True)
class AppendSpec(KernelSpec):
    """Spec of a kernel that writes rows to slots.

    `stored`: "copy", "nvfp4", "float8_e4m3fn" or "float8_e5m2". `dtype`: of rows that are quantised; "": any, copied.
    `slots`: "pages" (requests, positions and a page table), "mapped" (a slot number per row) or "rows" (row t of an
    output). `access`: bytes per access of a copy; of rows that are quantised 16, or the size of an element.
    `per_thread`: units of a head's row that a thread writes, 1 or 2: looking a slot up takes half as long as a unit.
    """

    kernel: ClassVar[str] = "append"
    needs_mma: ClassVar[bool] = False
    stored: str = COPY
    dtype: str = ""
    slots: str = "pages"
    access: int = VECTOR
    per_thread: int = 2


def default_specs() -> list[KernelSpec]:
    """Lists the kernels of aligned bf16 rows, and one of each other kind."""
    return [
        AppendSpec(),
        AppendSpec(access=2, per_thread=1),
        AppendSpec(NVFP4, "bfloat16", per_thread=1),
        AppendSpec(NVFP4, "bfloat16"),
        AppendSpec(NVFP4, "bfloat16", "mapped"),
        AppendSpec(NVFP4, "bfloat16", "rows", per_thread=1),
        AppendSpec(NVFP4, "float16"),
        AppendSpec(NVFP4, "float32", "mapped", 4, 1),
        AppendSpec("float8_e4m3fn", "bfloat16", "rows", per_thread=1),
    ]
