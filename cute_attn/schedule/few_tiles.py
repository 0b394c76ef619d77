"""Schedules of few query tiles in plain Python, number for number those that `batch` makes with arrays.

Of arrays of a few numbers each operation of numpy takes 0.7 us or more whatever their size, and a schedule needs 150 of
them. Here one takes a fourth of that time, and the search for a split size skips candidates that cannot be best.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cute_attn.schedule.constants import (
    BALANCED,
    BINS,
    COMBINE_TIME,
    EMPTY_TILE_TIME,
    ITEM_TIME,
    SHARE_DENOMINATOR,
    SORT_BINS,
    UNIT,
    WORTHWHILE,
)
from cute_attn.schedule.cost_model import Capacity, Device, candidates
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL, Item, Merge

if TYPE_CHECKING:
    from cute_attn.problem import BatchLengths
    from cute_attn.schedule.batch import SchedulerParams

UNSPLIT = 1 << 62  # kv tiles of a split
FEW = 16  # requests, and query tiles besides the last of each

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


def split_size(visible: list[int], device: Device, capacity: Capacity) -> int | None:
    """Returns the kv tiles of the longest split: what `cost_model.num_splits` divides by."""
    if not visible or capacity.merges < 1 or capacity.partials < 2:
        return None
    longest, total = max(visible), sum(visible)
    if longest < 2 * device.min_split_tiles:
        return None
    more, of = BALANCED
    if longest * device.resident_ctas * of <= (more - of) * total * device.ctas_per_item:
        return None
    search = Search.of(visible, longest, device, capacity)
    unsplit = max(search.share, search.fullest_unsplit())
    if unsplit * of <= search.share * more:
        return None
    return search.best(candidates(longest, total, device), unsplit * WORTHWHILE[0] // WORTHWHILE[1])


class Search(NamedTuple):
    """Search for the best split size of query tiles."""

    bins: list[tuple[int, int]]  # sizes in kv tiles, descending, and the query tiles of each size
    number: int  # of query tiles
    work: int  # time of all, unsplit
    share: int  # one CTA's equal share of it
    device: Device
    capacity: Capacity

    @classmethod
    def of(cls, visible: list[int], longest: int, device: Device, capacity: Capacity) -> Search:
        """Returns the search for query tiles that see so many kv tiles."""
        width = longest // BINS + 1
        counts: dict[int, int] = {}
        for size in sorted(visible, reverse=True):
            counts[size] = counts.get(size, 0) + 1
        if width > 1:
            by_bin: dict[int, tuple[int, int]] = {}
            for size, count in counts.items():  # the longest of a bin first
                top, before = by_bin.get(size // width, (size, 0))
                by_bin[size // width] = top, before + count
            counts = {}
            for size, count in by_bin.values():
                counts[size] = count
        work = 0
        for size, count in counts.items():
            work += (max(size * UNIT, EMPTY_TILE_TIME) + ITEM_TIME) * count
        work *= device.ctas_per_item
        return cls(list(counts.items()), len(visible), work, work // device.resident_ctas, device, capacity)

    def fullest_unsplit(self) -> int:
        """Returns the time of the fullest CTA of a launch without splits."""
        ctas, resident = self.device.ctas_per_item, self.device.resident_ctas
        at_least = fullest = 0
        for size, count in self.bins:
            at_least += count
            time = -(-at_least * ctas // resident) * (max(size * UNIT, EMPTY_TILE_TIME) + ITEM_TIME)
            if time > fullest:
                fullest = time
        return fullest

    def best(self, chunks: list[int], limit: int) -> int | None:
        """Returns the first of the split sizes `chunks` with the shortest makespan; None if that is above `limit`.

        From long splits to short ones: those whose longest item takes too long are left out, and the search ends where
        the equal share of work and partials does, which only grows from there on.
        """
        device, capacity, longest, found = self.device, self.capacity, self.bins[0][0], None
        ctas, resident = device.ctas_per_item, device.resident_ctas
        split_time = ITEM_TIME + device.partial_cost
        for chunk in sorted(chunks, reverse=True):
            if -(-longest // -(-longest // chunk)) * UNIT + ITEM_TIME > limit:
                continue
            items = partials = merges = longest_time = 0
            times = []
            for size, count in self.bins:
                splits = -(-size // chunk)
                if splits > 1:
                    merges += count
                    count *= splits
                    partials += count
                    time = -(-size // splits) * UNIT + split_time
                else:
                    time = (size or 1) * UNIT + ITEM_TIME  # a tile that sees no keys is one item too
                items += count
                times.append((time, count))
                if time > longest_time:
                    longest_time = time
            merging = partials * device.partial_cost * ctas
            work = self.work + (items - self.number) * ITEM_TIME * ctas + merging
            share, after = work // resident, merging // resident + COMBINE_TIME if partials else 0
            if share + after > limit:
                break
            if items > capacity.items or partials > capacity.partials or merges > capacity.merges:
                break
            if longest_time + after > limit:
                continue
            time = max(share, longest_time)
            if items * ctas > resident:
                time = max(time, self.fullest(times, longest_time))
            time += after
            if time < limit or (time == limit and (found is None or chunks.index(chunk) < chunks.index(found))):
                limit, found = time, chunk
        return found

    def fullest(self, times: list[tuple[int, int]], longest: int) -> int:
        """Returns the time of the fullest CTA, which has items of `times`, rounded down to a fraction of the
        `longest`.
        """
        ctas, resident = self.device.ctas_per_item, self.device.resident_ctas
        step = longest // BINS + 1
        at_least = fullest = 0
        for time, count in sorted(times, reverse=True):
            at_least += count
            rounded = -(-at_least * ctas // resident) * (time // step * step)
            if rounded > fullest:
                fullest = rounded
        return fullest


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
