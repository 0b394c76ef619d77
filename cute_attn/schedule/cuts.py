"""What the search for splits of query tiles reads besides lengths, and what it finds."""

from __future__ import annotations

from typing import NamedTuple

from cute_attn.schedule.constants import UNIT


class Capacity(NamedTuple):
    """Number of records of each kind that a schedule may have."""

    items: int
    merges: int
    partials: int


class Device(NamedTuple):
    """Inputs of the model besides lengths."""

    resident_ctas: int  # CTAs that run at once
    ctas_per_item: int  # the kv heads
    min_split_tiles: int  # kv tiles of the smallest split worth its partial
    partial_cost: int  # of writing or reading one partial, in units

    @classmethod
    def of(cls, resident_ctas: int, num_kv_heads: int, min_split_tiles: int, rows: int, cols: int) -> Device:
        """Returns the model of launches with tiles of `rows` and `cols`."""
        return cls(resident_ctas, num_kv_heads, min_split_tiles, UNIT * rows // cols)


class Cut(NamedTuple):
    """Which query tiles are split, in the order of requests, and how."""

    time: int  # of the launch, as the model estimates it
    first: int  # tiles from this one on are split
    size: int  # kv tiles of the longest part
