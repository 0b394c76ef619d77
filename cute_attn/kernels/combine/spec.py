"""Compile key of the kernel that merges split-KV partials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule.records import MAX_SPLITS

WARPS = 4  # of a CTA
FEW_ROWS = 8  # per SM: where there are no more, all warps of a CTA share a row
RESIDENT_ROWS = 40  # that an SM merges at once, by a warp each


@dataclass(frozen=True)
class CombineSpec(KernelSpec):
    """Spec of the combine kernel, which merges the fp32 partials of a split-KV launch."""

    kernel: ClassVar[str] = "combine"
    needs_mma: ClassVar[bool] = False
    max_splits: ClassVar[int] = MAX_SPLITS
    out_dtype: str
    head_dim_vo: int
    schedule: str = "grid"  # of the launch that wrote the partials


class RowsOfWarps(NamedTuple):
    """How a launch deals rows to warps. All but the grid are parameters of the kernel."""

    grid: tuple[int, int, int]
    num_rows: int
    warps_per_row: int


def rows_of_warps(num_rows: int, sms: int, exist: bool = True) -> RowsOfWarps:
    """Return the launch that merges so many rows on a GPU of `sms` multiprocessors. `exist`: all of them; otherwise
    they are as many as there may be, and no more CTAs are launched than run at once.
    """
    if num_rows <= FEW_ROWS * sms:
        return RowsOfWarps((num_rows, 1, 1), num_rows, WARPS)
    of_grid = num_rows if exist else min(num_rows, RESIDENT_ROWS * sms)
    return RowsOfWarps((-(-of_grid // WARPS), 1, 1), num_rows, 1)
