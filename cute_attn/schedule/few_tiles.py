"""Schedules of few query tiles in plain Python, number for number those that `batch` makes with arrays.

Of arrays of a few numbers each operation of numpy takes 0.7 us or more whatever their size, and a schedule needs 150 of
them. Here one takes a fourth of that time, and the search for a split size skips candidates that cannot be best.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cute_attn.schedule.constants import SORT_BINS
from cute_attn.schedule.cost_model import Capacity, split_size
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL, Item, Merge

if TYPE_CHECKING:
    from cute_attn.problem import BatchLengths
    from cute_attn.schedule.batch import SchedulerParams

UNSPLIT = 1 << 62  # kv tiles of a split
FEW = 8  # requests, and query tiles besides the last of each

_ITEM = f"8i8xi{4 * (ITEM_INTS - len(Item._fields))}x"  # all fields but the two of masks
_MERGE_FIELDS = len(Merge._fields)
_MERGE = f"{len(Merge._fields)}i{4 * (MERGE_INTS - len(Merge._fields))}x"


def covers(lengths: BatchLengths, params: SchedulerParams) -> bool:
    """Tells whether a batch has few query tiles, and nothing but lengths and a band mask decides what they see."""
    if lengths.batch_size > FEW or lengths.mask_offset is not None or lengths.key_bounds is not None:
        return False
    return (lengths.rows - lengths.first_row) * params.group_size <= FEW * params.rows


def query_tiles(qo_len: list[int], kv_len: list[int], params: SchedulerParams) -> list[tuple[int, int, int, int]]:
    """Returns the query tiles of all requests, as `batch.query_tiles`: request, first row, and the bounds of the kv
    tiles that are visible.
    """
    rows, cols, group, _, causal, window, *_ = params
    tiles = []
    for request, (tokens, keys) in enumerate(zip(qo_len, kv_len, strict=True)):
        last, begin = -(-keys // cols), 0
        for first_row in range(0, tokens * group, rows):
            end = last
            if causal:
                seen = (first_row + rows - 1) // group + keys - tokens + 1
                end = last if seen >= keys else -(-seen // cols) if seen > 0 else 0
            if window >= 0:
                begin = max(first_row // group + keys - tokens - window, 0) // cols
            tiles.append((request, first_row, begin, end))
    return tiles


class Items(NamedTuple):
    """Work items and merge records, not yet in the order of the launch."""

    rows: list[tuple[int, ...]]  # fields of `Item`, without those of masks
    costs: list[int]  # kv tiles
    merges: list[int]  # fields of `Merge`, flat
    num_partials: int


def items(lengths: BatchLengths, params: SchedulerParams, capacity: Capacity) -> Items:
    """Returns the items of a batch, in the order of query tiles, as `batch._balanced_splits`."""
    qo_start, qo_len, kv_start, kv_len = lengths.lists
    tiles = query_tiles(qo_len, kv_len, params)
    chunk = split_size([end - begin for _, _, begin, end in tiles], params.cost_device, capacity) or UNSPLIT
    rows: list[tuple[int, ...]] = []
    costs: list[int] = []
    merges: list[int] = []
    partials, cols = 0, params.cols
    for request, first_row, start, end in tiles:
        row, tokens, first_key, keys = qo_start[request], qo_len[request], kv_start[request], kv_len[request]
        begin, visible = start, end - start
        splits = -(-visible // chunk) or 1  # a tile that sees no keys is one item too
        partial, step = NO_PARTIAL, 0
        if splits > 1:
            merges += (row, tokens, first_row, partials, splits)
            partial, step = partials, 1
            partials += splits
        for split in range(1, splits + 1):
            stop = begin + split * visible // splits
            key_end = stop * cols
            if key_end > keys:
                key_end = keys
            rows.append((row, tokens, first_key, keys, first_row, start * cols, key_end, partial, request))
            costs.append(stop - start)
            partial += step
            start = stop
    return Items(rows, costs, merges, partials)


def longest_first(costs: list[int]) -> list[int]:
    """Returns the order of items: `batch.longest_first`."""
    width = max(costs, default=0) // SORT_BINS + 1
    bins = costs if width == 1 else [cost // width for cost in costs]
    return sorted(range(len(bins)), key=bins.__getitem__, reverse=True)  # stable too


def write(found: Items, order: list[int], ints: np.ndarray, item_capacity: int) -> None:
    """Writes items in an order to the front of the records, and merge records behind the capacity of items."""
    rows, _, merges, _ = found
    numbers: list[int] = []
    for item in order:
        numbers += rows[item]
    records = _records(len(rows), item_capacity - len(rows), len(merges) // _MERGE_FIELDS)
    records.pack_into(ints.data, 0, *numbers, *merges)


@functools.lru_cache(256)
def _records(items: int, unused: int, merges: int) -> struct.Struct:
    """Returns the layout of items, records of zeros, and merge records."""
    return struct.Struct(_ITEM * items + f"{4 * ITEM_INTS * unused}x" + _MERGE * merges)
