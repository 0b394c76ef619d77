"""Compile key of the kernel that merges split-KV partials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule.records import MAX_SPLITS


@dataclass(frozen=True)
class CombineSpec(KernelSpec):
    """Spec of the combine kernel, which merges the fp32 partials of a split-KV launch."""

    kernel: ClassVar[str] = "combine"
    needs_mma: ClassVar[bool] = False
    max_splits: ClassVar[int] = MAX_SPLITS
    out_dtype: str
    head_dim_vo: int
    schedule: str = "grid"  # of the launch that wrote the partials
