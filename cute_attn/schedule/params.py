"""What schedules follow from besides lengths, and how many records they may have."""

from __future__ import annotations

from typing import NamedTuple

from cute_attn.schedule.constants import UNIT


class SchedulerParams(NamedTuple):
    """Tile of a launch, the mask that all requests share, and properties of the device."""

    rows: int
    cols: int
    group_size: int  # num_qo_heads / num_kv_heads
    num_kv_heads: int  # CTAs of an item
    causal: bool
    window_left: int  # negative: none
    resident_ctas: int  # CTAs that the device runs at once
    min_split_tiles: int  # kv tiles of the smallest split worth its partial: split_kv.min_split_tiles
    partial_row_bytes: int  # 4 * (head_dim_vo + 1)
    l2_section_heads: int = 0  # kv heads processed side by side before the next ones begin; 0: all
    l2_kv_tokens: int = 0  # kv tokens of so many heads that L2 holds; 0: the order of requests does not matter

    @property
    def partial_cost(self) -> int:
        """Time of writing or reading one partial, as the cost model counts it."""
        return UNIT * self.rows // self.cols

    @property
    def partial_bytes(self) -> int:
        """Workspace bytes of one partial: o and lse of a query tile, for every kv head."""
        return self.num_kv_heads * self.rows * self.partial_row_bytes


class Capacity(NamedTuple):
    """Number of records of each kind that a schedule may have."""

    items: int
    merges: int
    partials: int
