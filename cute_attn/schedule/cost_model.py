"""Number of splits of each query tile of a batch: a search over split sizes with a model of the makespan.

Times count kv tiles. A device runs a number of items at once and starts the next one, longest first, where one ends.
The makespan is bounded from below by the longest item, by the work shared equally, and by the fullest CTA: when
`count` items cost `cost` or more, some CTA runs `ceil(count / concurrent_items)` of them. Longest-first order comes
close to the largest of the three (`python -m perf.plan` prints how close), so that it serves as the estimate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cute_attn.schedule.split_kv import MAX_SPLITS

# Estimates in kv tiles, not tuned on hardware. An item starts, reads its query rows and writes its result; the combine
# launch waits for the last item and then works for a while.
ITEM_COST = 2.0
COMBINE_COST = 3.0
EMPTY_TILE_COST = 0.5  # a query tile that sees no keys is still one item
BINS = 256  # lengths and costs are rounded to this fraction of the largest
BALANCED = 1.03  # times the work shared equally: no search for a makespan below that
WORTHWHILE = 0.95  # times the makespan without splits: the estimates are no more accurate than that

# Candidates for the split size: fractions of the longest tile, and multiples of one CTA's equal share of the work.
_LONGEST_DIVISORS = np.array([2.0, 3.0, 4.0, 5.0, 6.0, 8.0])
_SHARE_FACTORS = np.array([0.16, 0.2, 0.25, 1 / 3, 0.5, 0.55, 2 / 3, 0.75, 1.0, 1.1, 1.25, 1.5])
_BIN_INDEX = np.arange(BINS + 1.0)
_BIN_OFFSETS = np.arange(len(_LONGEST_DIVISORS) + len(_SHARE_FACTORS))[:, None] * (BINS + 1)


class Capacity(NamedTuple):
    """Number of records of each kind that a schedule may have."""

    items: int
    merges: int
    partials: int


class Device(NamedTuple):
    """Inputs of the model besides lengths."""

    concurrent_items: float  # items that run at once
    min_split_tiles: int  # kv tiles of the smallest split worth its partial
    partial_cost: float  # of writing or reading one partial, in kv tiles


def num_splits(visible: np.ndarray, device: Device, capacity: Capacity) -> np.ndarray | None:
    """Returns the number of splits of each query tile, given the kv tiles that it sees; None where no split pays."""
    longest = int(visible.max(initial=0))
    if longest < 2 * device.min_split_tiles or min(capacity.merges, capacity.partials // 2) < 1:
        return None
    total = int(visible.sum(dtype=np.int64))
    if longest * device.concurrent_items <= (BALANCED - 1.0) * total:
        return None  # so many waves that longest-first order fills the last one well
    sizes, counts = _histogram(visible, longest)
    unsplit, share = _unsplit_makespan(sizes, counts, device)
    if unsplit <= share * BALANCED:
        return None
    chunks = np.concatenate((longest / _LONGEST_DIVISORS, total / device.concurrent_items * _SHARE_FACTORS))
    chunks = np.ceil(np.minimum(np.maximum(chunks, max(device.min_split_tiles, longest / MAX_SPLITS)), longest))
    estimates = _makespans(sizes, counts, chunks, device, capacity)
    best = int(estimates.argmin())
    if estimates[best] > unsplit * WORTHWHILE:
        return None
    return -(-visible // int(chunks[best]))


def _histogram(visible: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most BINS sizes, ascending, and how many query tiles have this size or are a little shorter."""
    if longest <= BINS:
        bin_index, sizes = visible, np.arange(longest + 1.0)
    else:
        bin_index, sizes = visible // -(-(longest + 1) // BINS), np.zeros(BINS)
        np.maximum.at(sizes, bin_index, visible)
    counts = np.bincount(bin_index, minlength=len(sizes))
    used = counts.nonzero()[0]
    sizes[0] = max(sizes[0], EMPTY_TILE_COST)
    return sizes[used], counts[used].astype(np.float64)


def _unsplit_makespan(sizes: np.ndarray, counts: np.ndarray, device: Device) -> tuple[float, float]:
    """Returns the makespan of a launch without splits, and one CTA's equal share of its work."""
    cost = sizes + ITEM_COST
    at_least = counts[::-1].cumsum()[::-1]  # items of this cost or more
    fullest = (np.ceil(at_least / device.concurrent_items) * cost).max()
    share = float(cost @ counts) / device.concurrent_items
    return max(share, float(fullest)), share


def _makespans(
    sizes: np.ndarray, counts: np.ndarray, chunks: np.ndarray, device: Device, capacity: Capacity
) -> np.ndarray:
    """Returns, for each split size in `chunks`, the makespan when every tile gets the fewest splits of at most this
    size; infinite where the records exceed the capacity.
    """
    splits = np.ceil(sizes / chunks[:, None])
    is_split = (splits > 1.0).astype(np.float64)
    cost = np.ceil(sizes / splits)  # of the longest split
    cost += ITEM_COST + is_split * device.partial_cost
    items, partials, merges = splits @ counts, (splits * is_split) @ counts, is_split @ counts
    share = (sizes @ counts + ITEM_COST * items + device.partial_cost * partials) / device.concurrent_items

    longest = cost.max(1)
    step = longest.max() / BINS
    bin_index = (cost / step).astype(np.intp)
    bin_index += _BIN_OFFSETS[: len(chunks)]
    histogram = np.bincount(bin_index.ravel(), (splits * counts).ravel(), len(chunks) * (BINS + 1))
    histogram = histogram.reshape(len(chunks), -1)
    at_least = histogram[:, ::-1].cumsum(1)[:, ::-1]  # items of this cost or more
    fullest = (np.ceil(at_least / device.concurrent_items) * (_BIN_INDEX * step)).max(1)

    result = np.maximum(np.maximum(share, fullest), longest)
    result += np.where(partials > 0, COMBINE_COST + partials * device.partial_cost / device.concurrent_items, 0.0)
    over = (partials > capacity.partials) | (items > capacity.items) | (merges > capacity.merges)
    result[over] = np.inf
    return result
