"""Compile key of the kernel that merges split-KV partials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.runtime.spec import KernelSpec, Program


@dataclass(frozen=True)
class CombineSpec(KernelSpec):
    """Spec of the combine kernel, which merges the fp32 partials of a split-KV launch."""

    kernel: ClassVar[str] = "combine"
    needs_mma: ClassVar[bool] = False
    max_splits: ClassVar[int] = 128  # a lane of the merging warp holds the weights of 4 splits
    out_dtype: str
    head_dim_vo: int
    schedule: str = "grid"  # of the launch that wrote the partials

    def program(self, arch: str) -> Program:
        from cute_attn.kernels.combine.kernel import CombineProgram

        return CombineProgram(self, arch)
