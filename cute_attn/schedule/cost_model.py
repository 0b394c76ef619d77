"""Number of splits of each query tile of a batch: a search over split sizes with a model of the makespan.

A device runs a number of items at once and starts the next one, longest first, where one ends. The makespan is bounded
from below by the longest item, by the work shared equally, and by the fullest CTA: when `count` items cost `cost` or
more, some CTA runs `ceil(count / concurrent_items)` of them. Longest-first order comes close to the largest of the
three (`python -m perf.plan` prints how close), so that it serves as the estimate.

All arithmetic is in integers, and every division is of numbers >= 0 and rounds down: the planner kernel
(`kernels/plan`) makes the same schedules bit by bit. Times count `UNIT`ths of a kv tile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from cute_attn.schedule.constants import (
    BALANCED,
    BINS,
    CANDIDATES,
    COMBINE_TIME,
    EMPTY_TILE_TIME,
    IMPOSSIBLE,
    ITEM_TIME,
    LONGEST_DIVISORS,
    SHARE_DENOMINATOR,
    SHARE_FACTORS,
    UNIT,
    WORTHWHILE,
)
from cute_attn.schedule.split_kv import MAX_SPLITS, ceil_div

FEW_TILES = 64  # query tiles, of which the search for a split size takes longer than all else of a schedule
REMEMBERED = 256  # results of that search

_BIN_INDEX = np.arange(BINS)
_BIN_OFFSETS = np.arange(CANDIDATES)[:, None] * BINS


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


def num_splits(visible: np.ndarray, device: Device, capacity: Capacity) -> np.ndarray | None:
    """Returns the number of splits of each query tile, given the kv tiles that it sees; None where no split pays."""
    longest = int(visible.max(initial=0))
    if longest < 2 * device.min_split_tiles or min(capacity.merges, capacity.partials // 2) < 1:
        return None
    total = int(visible.sum(dtype=np.int64))
    more, of = BALANCED
    if longest * device.resident_ctas * of <= (more - of) * total * device.ctas_per_item:
        return None  # so many waves that longest-first order fills the last one well
    if len(visible) <= FEW_TILES:
        size = _remembered_split_size(visible.astype(np.int32).tobytes(), device, capacity)
    else:
        size = _split_size(visible, device, capacity)
    return None if size is None else -(-visible // np.int32(size))


def _split_size(visible: np.ndarray, device: Device, capacity: Capacity) -> int | None:
    """Returns the best split size in kv tiles; None where no split pays."""
    longest, total = int(visible.max()), int(visible.sum(dtype=np.int64))
    more, of = BALANCED
    sizes, counts = _histogram(visible, longest)
    unsplit, share = _unsplit_makespan(sizes, counts, device)
    if unsplit * of <= share * more:
        return None
    chunks = candidates(longest, total, device)
    estimates = _makespans(sizes, counts, chunks, device, capacity)
    best = int(estimates.argmin())
    if int(estimates[best]) * WORTHWHILE[1] > unsplit * WORTHWHILE[0]:
        return None
    return int(chunks[best])


@functools.lru_cache(REMEMBERED)
def _remembered_split_size(visible: bytes, device: Device, capacity: Capacity) -> int | None:
    """Returns `_split_size`. The steps of an engine differ in kv tiles once in 64 tokens of a request or so."""
    return _split_size(np.frombuffer(visible, np.int32), device, capacity)


def candidates(longest: int, total: int, device: Device) -> np.ndarray:
    """Returns the split sizes that are compared, in kv tiles."""
    least = max(device.min_split_tiles, ceil_div(longest, MAX_SPLITS))
    whole = device.resident_ctas * SHARE_DENOMINATOR
    sizes = [ceil_div(longest, divisor) for divisor in LONGEST_DIVISORS]
    sizes += [ceil_div(total * device.ctas_per_item * factor, whole) for factor in SHARE_FACTORS]
    return np.array([min(max(size, least), longest) for size in sizes])


def _histogram(visible: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most BINS sizes, ascending, and how many query tiles have this size or are a little shorter."""
    width = longest // BINS + 1
    if width == 1:
        bin_index, sizes = visible, _BIN_INDEX[: longest + 1]
    else:
        bin_index, sizes = visible // np.int32(width), np.zeros(BINS, np.int64)
        np.maximum.at(sizes, bin_index, visible)
    counts = np.bincount(bin_index, minlength=len(sizes))
    used = counts.nonzero()[0]
    return sizes[used], counts[used]


def _unsplit_makespan(sizes: np.ndarray, counts: np.ndarray, device: Device) -> tuple[int, int]:
    """Returns the makespan of a launch without splits, and one CTA's equal share of its work."""
    cost = np.maximum(sizes * UNIT, EMPTY_TILE_TIME) + ITEM_TIME
    at_least = counts[::-1].cumsum()[::-1]  # items of this cost or more
    fullest = (-(-at_least * device.ctas_per_item // device.resident_ctas) * cost).max()
    share = int(cost @ counts) * device.ctas_per_item // device.resident_ctas
    return max(share, int(fullest)), share


def _makespans(
    sizes: np.ndarray, counts: np.ndarray, chunks: np.ndarray, device: Device, capacity: Capacity
) -> np.ndarray:
    """Returns, for each split size in `chunks`, the makespan when every tile gets the fewest splits of at most this
    size; `IMPOSSIBLE` where the records exceed the capacity.
    """
    splits = np.maximum(-(-sizes // chunks[:, None]), 1)
    is_split = splits > 1
    cost = np.maximum(-(-sizes // splits), 1) * UNIT + ITEM_TIME  # of the longest split
    cost += is_split * device.partial_cost
    items, partials, merges = splits @ counts, (splits * is_split) @ counts, is_split @ counts
    work = int(np.maximum(sizes * UNIT, EMPTY_TILE_TIME) @ counts) + ITEM_TIME * items + device.partial_cost * partials
    share = work * device.ctas_per_item // device.resident_ctas

    longest = cost.max(1)
    step = longest[:, None] // BINS + 1
    bin_index = cost // step
    bin_index += _BIN_OFFSETS
    histogram = np.bincount(bin_index.ravel(), (splits * counts).ravel(), CANDIDATES * BINS)
    histogram = histogram.astype(np.int64).reshape(CANDIDATES, BINS)
    at_least = histogram[:, ::-1].cumsum(1)[:, ::-1]  # items of this cost or more
    waves = -(-at_least * device.ctas_per_item // device.resident_ctas)
    fullest = (waves * (_BIN_INDEX * step)).max(1)

    result = np.maximum(np.maximum(share, fullest), longest)
    merging = COMBINE_TIME + partials * (device.partial_cost * device.ctas_per_item) // device.resident_ctas
    result += np.where(partials > 0, merging, 0)
    over = (partials > capacity.partials) | (items > capacity.items) | (merges > capacity.merges)
    result[over] = IMPOSSIBLE
    return result
