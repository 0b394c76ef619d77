"""Schedules of few query tiles in plain Python, number for number those that `batch` makes with arrays.

Of arrays of a few numbers each operation of numpy takes 0.7 us or more whatever their size. The search for a split size
is that of all batches, whose results are remembered.
"""

from __future__ import annotations

import struct
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cute_attn.schedule.constants import SORT_BINS
from cute_attn.schedule.cost_model import best_cut
from cute_attn.schedule.cuts import Capacity
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL, Item, Merge

if TYPE_CHECKING:
    from cute_attn.problem import BatchLengths
    from cute_attn.schedule.batch import SchedulerParams

FEW = 8  # requests, and query tiles besides the last of each

_tiles_of = itemgetter(0)
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
    rows, cols, group, _, causal, window = params[:6]
    tiles, begin = [], 0
    for request, keys in enumerate(kv_len):
        tokens, last = qo_len[request], -(-keys // cols)
        end = last
        for first_row in range(0, tokens * group, rows):
            if causal:
                seen = (first_row + rows - 1) // group + keys - tokens + 1
                end = last if seen >= keys else -(-seen // cols) if seen > 0 else 0
            if window >= 0:
                begin = max(first_row // group + keys - tokens - window, 0) // cols
            tiles.append((request, first_row, begin, end))
    return tiles


class Items(NamedTuple):
    """Work items and merge records, not yet in the order of the launch."""

    items: list[tuple[int, tuple[int, ...]]]  # kv tiles, and fields of `Item` without those of masks
    merges: list[int]  # fields of `Merge`, flat
    num_partials: int


def items(lengths: BatchLengths, params: SchedulerParams, capacity: Capacity) -> Items:
    """Returns the items of a batch, in the order of query tiles, as `batch._balanced_splits`."""
    qo_start, qo_len, kv_start, kv_len = lengths.lists
    tiles = query_tiles(qo_len, kv_len, params)
    sizes = tuple([end - begin for _, _, begin, end in tiles])
    cut = best_cut(sizes, params.cost_device, capacity)
    first, chunk = (len(tiles), 1) if cut is None else (cut.first, cut.size)
    found: list[tuple[int, tuple[int, ...]]] = []
    merges: list[int] = []
    partials, cols = 0, params.cols
    for i, (request, first_row, begin, end) in enumerate(tiles):
        row, tokens, first_key, keys = qo_start[request], qo_len[request], kv_start[request], kv_len[request]
        last = end * cols
        if last > keys:
            last = keys
        visible = end - begin
        if i < first or visible <= chunk:
            item = row, tokens, first_key, keys, first_row, begin * cols, last, NO_PARTIAL, request
            found.append((visible, item))
            continue
        splits, start = -(-visible // chunk), begin
        merges += (row, tokens, first_row, partials, splits)
        for split in range(1, splits + 1):
            stop = begin + split * visible // splits
            key_end = stop * cols if split < splits else last
            item = row, tokens, first_key, keys, first_row, start * cols, key_end, partials, request
            found.append((stop - start, item))
            partials += 1
            start = stop
    return Items(found, merges, partials)


def longest_first(found: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns items in the order of `batch.longest_first`."""
    ordered = sorted(found, key=_tiles_of, reverse=True)  # stable too
    if not found or (width := ordered[0][0] // SORT_BINS + 1) == 1:
        return ordered
    return sorted(found, key=lambda item: item[0] // width, reverse=True)


def write(ordered: list[tuple[int, tuple[int, ...]]], merges: list[int], ints: np.ndarray, item_capacity: int) -> None:
    """Writes items to the front of the records, and merge records behind the capacity of items."""
    numbers: list[int] = []
    for _, item in ordered:
        numbers += item
    numbers += merges
    unused = 4 * ITEM_INTS * (item_capacity - len(ordered))
    layout = _ITEM * len(ordered) + f"{unused}x" + _MERGE * (len(merges) // _MERGE_FIELDS)
    struct.pack_into(layout, ints.data, 0, *numbers)  # the module keeps what it makes of layouts
