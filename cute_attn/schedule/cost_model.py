"""Number of splits of each query tile of a batch: a search over split sizes, of all tiles or of those of the last wave,
with a model of the makespan.

A device runs a number of items at once and starts the next one, longest first, where one ends. The makespan is bounded
from below by the longest item, by the work shared equally, and by the fullest CTA: when `count` items cost `cost` or
more, some CTA runs `ceil(count / concurrent_items)` of them. Longest-first order comes close to the largest of the
three (how close: `tests/schedule/test_makespan.py`), so that it serves as the estimate.

All arithmetic is in integers, and every division is of numbers >= 0 and rounds down: the planner kernel
(`kernels/plan`) makes the same schedules bit by bit. Times count `UNIT`ths of a kv tile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from cute_attn.problem import largest, smallest
from cute_attn.schedule.constants import (
    BALANCED,
    BINS,
    COMBINE_TIME,
    CUT_WORTHWHILE,
    EMPTY_TILE_TIME,
    IMPOSSIBLE,
    ITEM_TIME,
    LONGEST_DIVISORS,
    MOST_PARTS,
    SHARE_DENOMINATOR,
    SHARE_FACTORS,
    UNIT,
    WORTHWHILE,
)
from cute_attn.schedule.cuts import Capacity, Cut, SchedulerParams
from cute_attn.schedule.split_kv import MAX_SPLITS

FEW_TILES = 64  # query tiles, of which the search for a split size takes longer than all else of a schedule
REMEMBERED = 256  # results of that search

_SIZES = np.arange(BINS)
_COSTS = np.maximum(_SIZES * UNIT, EMPTY_TILE_TIME) + ITEM_TIME  # of items of these sizes, unsplit
_ITEM_BITS = 40  # of a batch: at most MAX_SPLITS for each of 2^30 rows
# As an operand an array of no dimension takes numpy half the time of a Python int.
_MINUS_ONE, _ONE, _UNIT, _BINS = map(np.array, (-1, 1, UNIT, BINS))
_SHIFT, _MASK = map(np.array, (_ITEM_BITS, (1 << _ITEM_BITS) - 1))
most = np.maximum.reduce  # half the time of an array's `max`


class Tiles(NamedTuple):
    """The query tiles of a batch, grouped by the kv tiles that they see."""

    sizes: np.ndarray  # ascending, at most BINS; a tile that sees no keys is one item too and counts as 1
    counts: np.ndarray  # query tiles of each size, or a little shorter
    number: int  # of query tiles
    work: int  # time of all, unsplit, for one kv head


def num_splits(visible: np.ndarray, params: SchedulerParams, capacity: Capacity) -> np.ndarray | None:
    """Returns the number of splits of each query tile, given the kv tiles that it sees; None where no split pays."""
    if len(visible) <= FEW_TILES:
        cut = best_cut(visible.astype(np.int64).tobytes(), params, capacity)
    else:
        cut = _best_cut(visible, params, capacity)
    if cut is None:
        return None
    splits = np.maximum(-(-visible // cut.size), 1)  # a tile that sees no keys is one item too
    splits[: cut.first] = 1
    return splits


@functools.lru_cache(REMEMBERED)
def best_cut(visible: bytes, params: SchedulerParams, capacity: Capacity) -> Cut | None:
    """Returns how to split a batch of few query tiles; None where no split pays. The steps of an engine differ in kv
    tiles once in 64 tokens of a request or so.
    """
    return _best_cut(np.frombuffer(visible, np.int64), params, capacity)


def _best_cut(visible: np.ndarray, params: SchedulerParams, capacity: Capacity) -> Cut | None:
    """Returns the best of all splits; None where none pays."""
    longest, total = largest(visible) if len(visible) else 0, int(np.add.reduce(visible, dtype=np.int64))
    more, whole = BALANCED  # of so many waves that longest-first order fills the last one well, no split pays
    if longest < 2 * params.min_split_tiles or capacity.merges < 1 or capacity.partials < 2:
        return None
    if longest * params.resident_ctas * whole <= (more - whole) * total * params.num_kv_heads:
        return None
    sizes, costs, counts = _histogram(visible, longest)
    work = int(costs.dot(counts))
    share = work * params.num_kv_heads // params.resident_ctas
    unsplit = max(share, _fullest_unsplit(costs, counts, len(visible), params))
    if unsplit * whole <= share * more:
        return None
    used = counts.nonzero()[0]
    sizes = sizes.take(used)
    sizes[0] = sizes[0] or 1  # others are above 0
    tiles = Tiles(sizes, counts.take(used), len(visible), work)
    chunks = candidates(longest, total, params)
    estimates = _makespans(tiles, chunks, params, capacity)
    best = int(estimates.argmin())
    even, last = Cut(int(estimates[best]), 0, chunks[best]), last_wave(len(visible), longest, params, capacity)
    found = even if even.time * WORTHWHILE[1] <= unsplit * WORTHWHILE[0] else None
    if last is None or last.time * CUT_WORTHWHILE[1] > unsplit * CUT_WORTHWHILE[0]:
        return found
    return last if found is None or last.time < found.time else found


def last_wave(number: int, longest: int, params: SchedulerParams, capacity: Capacity) -> Cut | None:
    """Returns the best cut of the last wave of so many query tiles, the longest of so many kv tiles; None where there
    is no wave before it, or no room. All tiles are taken to be as long as the longest.

    Where the last wave is not full, CTAs are idle for the time of a whole tile, and splitting every tile evenly costs a
    partial result for each. Example: 160 tiles, each of 34 units of time, on 132 CTAs take 68 units. Cut in four, 40 of
    them make 160 parts of 11 units: the 12 CTAs that have no tile in the first wave take 36 of these meanwhile, and all
    CTAs the others afterwards, so that the launch takes 45 units, and the merge.
    """
    resident, ctas = params.resident_ctas, params.num_kv_heads
    waves, rest = divmod(number * ctas, resident)
    first = waves * resident // ctas
    if not first or not rest:
        return None
    cut, idle = number - first, waves * resident - first * ctas  # CTAs that have no tile in the last full wave
    whole = longest * UNIT + ITEM_TIME
    best = None
    for most in range(2, MOST_PARTS + 1):
        size = -(-longest // most)
        parts = cut * -(-longest // size)
        fits = cut <= capacity.merges and parts <= capacity.partials and first + parts <= capacity.items
        if not fits or size < params.min_split_tiles:
            break  # nor do more parts
        part = size * UNIT + ITEM_TIME + params.partial_cost
        late = max(parts * ctas - idle * (whole // part), 0)
        time = waves * whole - -late // resident * part  # rounded up
        time += COMBINE_TIME + parts * ctas * params.partial_cost // resident
        if best is None or time < best.time:
            best = Cut(time, first, size)
    return best


def candidates(longest: int, total: int, params: SchedulerParams) -> list[int]:
    """Returns the split sizes that are compared, in kv tiles, each once: of equal estimates the first wins."""
    least = max(params.min_split_tiles, -(-longest // MAX_SPLITS))  # below the longest query tile: `_best_cut`
    debt, whole = -total * params.num_kv_heads, params.resident_ctas * SHARE_DENOMINATOR  # below 0: this rounds up
    sizes = [-(-longest // divisor) for divisor in LONGEST_DIVISORS]
    sizes += [-(debt * factor // whole) for factor in SHARE_FACTORS]
    return list(dict.fromkeys(least if size < least else longest if size > longest else size for size in sizes))


def _histogram(visible: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns at most BINS sizes, ascending, what an item of each costs, and how many query tiles have this size or are
    a little shorter. Sizes that no tile has are any smaller number.
    """
    width = longest // BINS + 1
    if width == 1:
        return _SIZES[: longest + 1], _COSTS[: longest + 1], np.bincount(visible)
    bin_index, sizes = visible // np.int32(width), np.zeros(BINS, np.int64)
    np.maximum.at(sizes, bin_index, visible)
    return sizes, np.maximum(sizes * UNIT, EMPTY_TILE_TIME) + ITEM_TIME, np.bincount(bin_index, minlength=BINS)


def _fullest_unsplit(costs: np.ndarray, counts: np.ndarray, items: int, params: SchedulerParams) -> int:
    """Returns the time of the fullest CTA of a launch without splits. `costs` ascend where `counts` are not 0."""
    if items * params.num_kv_heads <= params.resident_ctas:
        return largest(costs)
    waves = counts[::-1].cumsum() * -params.num_kv_heads // params.resident_ctas  # below 0: this rounds up
    return -smallest(waves * costs[::-1])


def _makespans(tiles: Tiles, chunks: list[int], params: SchedulerParams, capacity: Capacity) -> np.ndarray:
    """Returns, for each split size in `chunks`, the makespan when every tile gets the fewest splits of at most this
    size; `IMPOSSIBLE` where the records exceed the capacity.

    Of arrays of a few numbers each operation takes the same time: they are as few as possible. Quotients that are to be
    rounded up are those of negative numbers.
    """
    sizes, ctas = tiles.sizes, params.num_kv_heads
    splits = -sizes // np.array(chunks)[:, None]  # negative
    is_split = splits < _MINUS_ONE
    cost = np.where(is_split, ITEM_TIME + params.partial_cost, ITEM_TIME)
    cost -= sizes // splits * _UNIT  # and the kv tiles of the longest split, which come out negative too
    splits *= -tiles.counts  # items
    longest = most(cost, 1)
    fullest, items = _fullest(cost, splits, longest, params)
    merges = is_split.dot(tiles.counts)
    partials = items + (merges - tiles.number)
    traffic = partials * (params.partial_cost * ctas)
    work = items * (ITEM_TIME * ctas) + traffic
    work += (tiles.work - tiles.number * ITEM_TIME) * ctas
    result = np.maximum(np.maximum(work // params.resident_ctas, fullest), longest)
    result += traffic // params.resident_ctas + COMBINE_TIME
    if (whole := int(sizes[-1])) in chunks:  # splits nothing
        result[chunks.index(whole)] -= COMBINE_TIME
    finest = chunks.index(min(chunks))  # has the most records of every kind
    if items[finest] > capacity.items or partials[finest] > capacity.partials or merges[finest] > capacity.merges:
        over = (partials > capacity.partials) | (items > capacity.items) | (merges > capacity.merges)
        result[over] = IMPOSSIBLE
    return result


def _fullest(
    cost: np.ndarray, items: np.ndarray, longest: np.ndarray, params: SchedulerParams
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the time of the fullest CTA of every row, which has `items` of each `cost`, rounded down to a fraction of
    the `longest`; and all items of the row.
    """
    step = (longest // _BINS + _ONE)[:, None]
    keys = items - (cost // step << _SHIFT)
    keys.sort(1)  # longest items first
    at_least = (keys & _MASK).cumsum(1)  # items of this cost or more, behind the last that is as long
    waves = at_least * -params.num_kv_heads // params.resident_ctas
    return most((keys >> _SHIFT) * step * waves, 1), at_least[:, -1]  # a product of two negative numbers
