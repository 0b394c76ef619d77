"""Schedules of few query tiles in plain Python, number for number those that `batch` makes with arrays.

Of arrays of a few numbers each operation of numpy takes 0.7 us or more whatever their size, and a schedule needs 150 of
them. Here one takes a fourth of that time, and the search for a split size skips candidates that cannot be best.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cute_attn.schedule.constants import SORT_BINS
from cute_attn.schedule.cost_model import Capacity, Device, split_size
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL, Item, Merge

if TYPE_CHECKING:
    from cute_attn.problem import BatchLengths
    from cute_attn.schedule.batch import SchedulerParams

UNSPLIT = 1 << 62  # kv tiles of a split
FEW = 8  # requests, and query tiles besides the last of each

_ITEM_PADDING = (0,) * (ITEM_INTS - len(Item._fields))
_MERGE_PADDING = (0,) * (MERGE_INTS - len(Merge._fields))


class QueryTile(NamedTuple):
    """A query tile that has rows."""

    request: int
    first_row: int
    begin: int  # kv tiles [begin, end) are visible
    end: int


def covers(lengths: BatchLengths, params: SchedulerParams) -> bool:
    """Tells whether a batch has few query tiles, and nothing but lengths and a band mask decides what they see."""
    starts = lengths.qo_indptr
    if len(starts) > FEW + 1 or lengths.mask_offset is not None or lengths.key_bounds is not None:
        return False
    return bool((starts.item(-1) - starts.item(0)) * params.group_size <= FEW * params.rows)


def query_tiles(qo_len: list[int], kv_len: list[int], params: SchedulerParams) -> list[QueryTile]:
    """Returns the query tiles of all requests: `batch.query_tiles`."""
    rows, cols, group, window = params.rows, params.cols, params.group_size, params.window_left
    tiles = []
    for request, (tokens, keys) in enumerate(zip(qo_len, kv_len, strict=True)):
        last, begin = -(-keys // cols), 0
        for first_row in range(0, tokens * group, rows):
            end = last
            if params.causal:
                seen = (first_row + rows - 1) // group + keys - tokens + 1
                end = 0 if seen <= 0 else last if seen >= keys else -(-seen // cols)
            if window >= 0:
                begin = max(first_row // group + keys - tokens - window, 0) // cols
            tiles.append(QueryTile(request, first_row, begin, end))
    return tiles


class Items(NamedTuple):
    """Work items and merge records, not yet in the order of the launch."""

    rows: list[tuple[int, ...]]  # fields of `Item`, padded
    costs: list[int]  # kv tiles
    merges: list[int]  # fields of `Merge`, padded, flat
    num_partials: int


def items(lengths: BatchLengths, params: SchedulerParams, device: Device, capacity: Capacity) -> Items:
    """Returns the items of a batch, in the order of query tiles: `batch._balanced_splits`."""
    qo_len, kv_len = lengths.qo_len.tolist(), lengths.kv_len.tolist()
    heads = list(zip(lengths.qo_indptr.tolist(), qo_len, lengths.kv_start.tolist(), kv_len, strict=False))
    tiles = query_tiles(qo_len, kv_len, params)
    chunk = split_size([end - begin for _, _, begin, end in tiles], device, capacity) or UNSPLIT
    rows, costs, merges, partials, cols = [], [], [], 0, params.cols
    for request, first_row, begin, end in tiles:
        head, visible = heads[request], end - begin
        splits = -(-visible // chunk)
        if splits <= 1:
            rows.append(
                (*head, first_row, begin * cols, min(end * cols, head[3]), NO_PARTIAL, 0, 0, request, *_ITEM_PADDING)
            )
            costs.append(visible)
            continue
        merges += (head[0], head[1], first_row, partials, splits, *_MERGE_PADDING)
        start = begin
        for split in range(1, splits + 1):
            stop = begin + split * visible // splits
            rows.append(
                (*head, first_row, start * cols, min(stop * cols, head[3]), partials, 0, 0, request, *_ITEM_PADDING)
            )
            costs.append(stop - start)
            partials += 1
            start = stop
    return Items(rows, costs, merges, partials)


def longest_first(costs: list[int]) -> list[int]:
    """Returns the order of items: `batch.longest_first`."""
    width = max(costs, default=0) // SORT_BINS + 1
    bins = costs if width == 1 else [cost // width for cost in costs]
    return sorted(range(len(bins)), key=bins.__getitem__, reverse=True)  # stable too


def write(rows: list[tuple[int, ...]], order: list[int], merges: list[int], ints: np.ndarray, merges_at: int) -> None:
    """Writes items in an order to the front of the records, and merge records at an index."""
    flat: list[int] = []
    for i in order:
        flat += rows[i]
    struct.pack_into(f"{len(flat)}i", ints, 0, *flat)
    struct.pack_into(f"{len(merges)}i", ints, 4 * merges_at, *merges)
