"""Number of splits of each query tile of a batch: a search over split sizes, of all tiles or of those of the last wave,
with a model of the makespan.

A device runs a number of items at once and starts the next one, longest first, where one ends. The makespan of splits
is estimated as the largest of three: the longest item, the work shared equally, and the long items wave by wave, those
of more than half the time of the longest; shorter ones fill what waves leave free. Without splits the third is the
fullest CTA: when `count` items cost `cost` or more, some CTA runs `ceil(count / concurrent_items)` of them. How close
schedules come to the best: `tests/schedule/test_makespan.py`.

All arithmetic is in integers, and every division is of numbers >= 0 and rounds down: the planner kernel
(`kernels/plan`) makes the same schedules bit by bit. Times count `UNIT`ths of a kv tile.
"""

from __future__ import annotations

import functools

import numpy as np

from cute_attn.problem import largest, smallest
from cute_attn.schedule.constants import (
    BALANCED,
    BINS,
    CANDIDATES,
    COMBINE_TIME,
    CUT_WORTHWHILE,
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

_DIVISORS, _FACTORS = np.array(LONGEST_DIVISORS), np.array(SHARE_FACTORS)
# As operands of small arrays, arrays of no dimension take numpy half the time of Python's integers.
_ONE, _TWO, _SIGN, _UNIT, _ITEM_TIME, _COMBINE_TIME = map(np.array, (1, 2, 63, UNIT, ITEM_TIME, COMBINE_TIME))


def num_splits(visible: np.ndarray, params: SchedulerParams, capacity: Capacity) -> np.ndarray:
    """Returns the number of splits of each query tile, given the kv tiles that it sees; nothing where no split pays."""
    if len(visible) <= FEW_TILES:
        cut = best_cut(visible.tobytes(), params, capacity)
    else:
        cut = _best_cut(visible, params, capacity)
    if cut is None:
        return visible[:0]
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
    longest, total = (largest(visible), int(visible.cumsum().item(-1))) if len(visible) else (0, 0)
    more, whole = BALANCED  # of so many waves that longest-first order fills the last one well, no split pays
    if longest < 2 * params.min_split_tiles or capacity.merges < 1 or capacity.partials < 2:
        return None
    if longest * params.resident_ctas * whole <= (more - whole) * total * params.num_kv_heads:
        return None
    sizes, counts = _histogram(visible, longest)
    costs = sizes * _UNIT + _ITEM_TIME
    share = int(costs.dot(counts)) * params.num_kv_heads // params.resident_ctas
    waves = counts[::-1].cumsum() * -params.num_kv_heads // params.resident_ctas  # below 0: this rounds up
    unsplit = max(share, -smallest(waves * costs[::-1]))  # of the fullest CTA
    if unsplit * whole <= share * more:
        return None
    chunks = candidates(longest, total, params)
    estimates = _makespans(sizes, counts, chunks, params, capacity)
    best = int(estimates.argmin())
    even, last = Cut(estimates.item(best), 0, chunks.item(best)), last_wave(len(visible), longest, params, capacity)
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


def candidates(longest: int, total: int, params: SchedulerParams) -> np.ndarray:
    """Returns the split sizes that are compared, in kv tiles: of equal estimates the first wins."""
    least = max(params.min_split_tiles, -(-longest // MAX_SPLITS))  # below the longest query tile: `_best_cut`
    debt, parts = -total * params.num_kv_heads, len(LONGEST_DIVISORS)
    sizes = np.empty(CANDIDATES, np.int64)  # below 0: this rounds up
    sizes[:parts] = -longest // _DIVISORS
    sizes[parts:] = debt * _FACTORS // (params.resident_ctas * SHARE_DENOMINATOR)
    np.maximum(-sizes, least, out=sizes)
    return np.minimum(sizes, longest, out=sizes)


def _histogram(visible: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most BINS sizes, ascending, and how many query tiles have this size or are a little shorter. Without
    visible keys a tile is one item too, and counts as one kv tile.
    """
    width = longest // BINS + 1
    bins = visible if width == 1 else visible // width
    counts = np.bincount(bins)
    used = counts.nonzero()[0]
    if width == 1:
        return np.maximum(used, 1), counts.take(used)
    sizes = np.zeros(len(counts), visible.dtype)
    np.maximum.at(sizes, bins, visible)
    return np.maximum(sizes.take(used), 1, dtype=np.int64), counts.take(used)


def _makespans(
    sizes: np.ndarray, counts: np.ndarray, chunks: np.ndarray, params: SchedulerParams, capacity: Capacity
) -> np.ndarray:
    """Returns, for each split size in `chunks`, the makespan when every query tile gets the fewest splits of at most
    this size; `IMPOSSIBLE` where the records exceed the capacity.

    Of small arrays each operation takes the same time, 5 times as much where one has another shape or dtype. So all are
    matrices of the same shape, a row per size, and sums are products. Many are negative: quotients of these round up.
    """
    ctas, resident, partial_cost = map(np.array, (params.num_kv_heads, params.resident_ctas, params.partial_cost))
    shape, less = (len(sizes), len(chunks)), -counts
    size = sizes.repeat(len(chunks)).reshape(shape)
    splits = -size // _rows(chunks, shape)
    is_split = (splits + _ONE) >> _SIGN  # -1 or 0
    cost = size // splits * _UNIT  # of the kv tiles of the longest split
    cost += is_split * partial_cost
    cost -= _ITEM_TIME
    items, merges, work = less.dot(splits), less.dot(is_split), splits * cost
    partials = items + merges + less.cumsum()[-1]
    longest = np.minimum.reduce(cost)
    result = np.maximum(counts.dot(work) * ctas // resident, -longest)
    # Items of more than half the time of the longest, of their mean time, wave by wave.
    is_long = cost * _TWO < _rows(longest, shape)
    number, time = less.dot(splits * is_long), counts.dot(work * is_long)
    np.maximum(result, -(number * -ctas // resident * (time // number)), out=result)
    result += partials * (partial_cost * ctas) // resident
    result += np.minimum(partials, _ONE) * _COMBINE_TIME
    finest = chunks.argmin()  # has the most records of every kind
    if items[finest] > capacity.items or partials[finest] > capacity.partials or merges[finest] > capacity.merges:
        over = (partials > capacity.partials) | (items > capacity.items) | (merges > capacity.merges)
        result[over] = IMPOSSIBLE
    return result


def _rows(row: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Returns a matrix whose rows are all the same."""
    matrix = np.empty(shape, np.int64)
    matrix[:] = row
    return matrix
