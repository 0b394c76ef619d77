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

from cute_attn.problem import largest, smallest
from cute_attn.schedule.constants import (
    BALANCED,
    BINS,
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
from cute_attn.schedule.split_kv import MAX_SPLITS

FEW_TILES = 64  # query tiles, of which the search for a split size takes longer than all else of a schedule
PLAIN_TILES = 16  # query tiles, of which plain Python takes less time for the search than numpy
REMEMBERED = 256  # results of that search

_SIZES = np.arange(BINS)
_COSTS = np.maximum(_SIZES * UNIT, EMPTY_TILE_TIME) + ITEM_TIME  # of items of these sizes, unsplit
_ITEM_BITS = 40  # of a batch: at most MAX_SPLITS for each of 2^30 rows
# As an operand an array of no dimension takes numpy half the time of a Python int.
_MINUS_ONE, _ONE, _UNIT, _BINS = map(np.array, (-1, 1, UNIT, BINS))
_SHIFT, _MASK = map(np.array, (_ITEM_BITS, (1 << _ITEM_BITS) - 1))
# The smallest of LONGEST_DIVISORS that is no less than the index, and the largest of SHARE_FACTORS that is no more.
_DIVISOR_FROM = [min(d for d in LONGEST_DIVISORS if d >= i) for i in range(LONGEST_DIVISORS[-1] + 1)]
_FACTOR_TO = [max((f for f in SHARE_FACTORS if f <= i), default=0) for i in range(SHARE_FACTORS[-1] + 1)]
most = np.maximum.reduce  # half the time of an array's `max`


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


class Tiles(NamedTuple):
    """The query tiles of a batch, grouped by the kv tiles that they see."""

    sizes: np.ndarray  # ascending, at most BINS; a tile that sees no keys is one item too and counts as 1
    counts: np.ndarray  # query tiles of each size, or a little shorter
    number: int  # of query tiles
    work: int  # time of all, unsplit, for one kv head


def num_splits(visible: np.ndarray, device: Device, capacity: Capacity) -> np.ndarray | None:
    """Returns the number of splits of each query tile, given the kv tiles that it sees; None where no split pays."""
    if not len(visible):
        return None
    longest, total = largest(visible), int(np.add.reduce(visible, dtype=np.int64))
    if not _may_pay(longest, total, device, capacity):
        return None
    if len(visible) <= FEW_TILES:
        size = split_size(tuple(visible.tolist()), device, capacity)
    else:
        size = _split_size(visible, longest, total, device, capacity)
    if size is None:
        return None
    return -(-visible // size)


@functools.lru_cache(REMEMBERED)
def split_size(visible: tuple[int, ...], device: Device, capacity: Capacity) -> int | None:
    """Returns the kv tiles of the longest split of few query tiles, by which `num_splits` divides; None where no split
    pays. The steps of an engine differ in kv tiles once in 64 tokens of a request or so.
    """
    longest, total = max(visible) if visible else 0, sum(visible)  # `default` takes longer than all of it
    if not _may_pay(longest, total, device, capacity):
        return None
    if len(visible) <= PLAIN_TILES:
        return _split_size_of_few(visible, longest, total, device, capacity)
    return _split_size(np.array(visible, np.int32), longest, total, device, capacity)


def _may_pay(longest: int, total: int, device: Device, capacity: Capacity) -> bool:
    """Tells whether a search is worth its time. `longest`, `total`: kv tiles that a query tile sees, and all."""
    resident, ctas, min_split_tiles, _ = device
    if longest < 2 * min_split_tiles or capacity.merges < 1 or capacity.partials < 2:
        return False
    more, of = BALANCED  # of so many waves that longest-first order fills the last one well, no split pays
    return longest * resident * of > (more - of) * total * ctas


def _split_size_of_few(
    visible: tuple[int, ...], longest: int, total: int, device: Device, capacity: Capacity
) -> int | None:
    """Returns `_split_size`, in plain Python."""
    more, of = BALANCED
    resident, ctas, _, _ = device
    sizes = sorted(visible, reverse=True)
    if longest >= BINS:
        sizes = _rounded_up(sizes)
    number = work = fullest = 0
    for size in sizes:
        number += 1
        time = (size * UNIT or EMPTY_TILE_TIME) + ITEM_TIME
        work += time
        time *= -(-number * ctas // resident)
        if time > fullest:
            fullest = time
    share = work * ctas // resident
    unsplit = fullest if fullest > share else share
    if unsplit * of <= share * more:
        return None
    limit = unsplit * WORTHWHILE[0] // WORTHWHILE[1]
    return _best(sizes, total, work - number * ITEM_TIME, limit, device, capacity)


def _rounded_up(sizes: list[int]) -> list[int]:
    """Returns the sizes of query tiles, which descend, each rounded up to the largest of its bin in `_histogram`."""
    width, rounded = sizes[0] // BINS + 1, sizes[:1]
    for size in sizes[1:]:
        rounded.append(rounded[-1] if size // width == rounded[-1] // width else size)
    return rounded


def _best(sizes: list[int], total: int, work: int, limit: int, device: Device, capacity: Capacity) -> int | None:
    """Returns the first of `candidates` whose makespan is the shortest and at most `limit`, or a longer one that makes
    the same splits. `sizes`: of query tiles, descending; `work`: time of all kv tiles, for one kv head.

    Split sizes descend from the first whose longest item may end in time, past those that make the same splits, until
    work and partials, shared equally, take too long: with shorter splits these never take less. Of 15 candidates for 2
    query tiles 4 are computed.
    """
    resident, ctas, min_split_tiles, partial_cost = device
    most_items, most_merges, most_partials = capacity
    longest = sizes[0]
    fractions = longest, total * ctas, resident * SHARE_DENOMINATOR, _least(longest, min_split_tiles)
    tiles = (limit - COMBINE_TIME - ITEM_TIME - partial_cost) // UNIT  # of the longest split that may be best
    most = 0 if tiles < 1 else longest if tiles >= longest else (longest - 1) // (-(-longest // tiles) - 1)
    work, item_work, partial_work = work * ctas, ITEM_TIME * ctas, partial_cost * ctas
    one_more = 0  # time of one more split, shared
    if longest < BINS:  # else the next size may make the same splits of rounded query tiles
        one_more = (item_work + partial_work) // resident + partial_work // resident
    alike: tuple[int, int] | None = None  # bounds of the best: all between make the same splits
    chunk = longest if SHARE_FACTORS[-1] * fractions[1] > (longest - 1) * fractions[2] else _next(most, *fractions)
    while chunk:
        items = partials = merges = slowest = same = 0
        times = []
        for size in sizes:
            if size > chunk:
                splits = -(-size // chunk)
                size = -(-size // splits)
                time = size * UNIT + (ITEM_TIME + partial_cost)
                merges += 1
                partials += splits
            else:
                splits = 1
                time = (size or 1) * UNIT + ITEM_TIME  # a tile that sees no keys is one item too
            if size > same:  # the shortest chunk that makes the same splits
                same = size
            if time > slowest:
                slowest = time
            items += splits
            times.append((time, splits))
        after = partials * partial_work // resident + COMBINE_TIME if partials else 0
        share = (work + items * item_work + partials * partial_work) // resident + after  # no less with shorter splits
        if share > limit or items > most_items or partials > most_partials or merges > most_merges:
            break
        time = slowest + after
        if share > time:
            time = share
        if items * ctas > resident and time <= limit and (fullest := _fullest_of_few(times, device) + after) > time:
            time = fullest
        if longest >= BINS:
            same = chunk
        if time < limit or (
            time == limit and (alike is None or _precedes(candidates(longest, total, device), (same, chunk), alike))
        ):
            limit, alike = time, (same, chunk)
        if share + one_more > limit:
            break
        chunk = _next(same - 1 if same <= most else most, *fractions)
    return alike[1] if alike else None


def _next(bound: int, longest: int, share: int, whole: int, least: int) -> int:
    """Returns the longest of `candidates` up to a bound that is below the longest query tile; 0: there is none. `share`
    divided by `whole`: what the factors multiply.
    """
    if bound < least:
        return 0
    divisor, factor = -(-longest // bound), bound * whole // share
    size = -(-longest // _DIVISOR_FROM[divisor]) if divisor < len(_DIVISOR_FROM) else 0
    other = -(-share * _FACTOR_TO[factor if factor < len(_FACTOR_TO) else -1] // whole)
    if other > size:
        size = other
    return least if 0 < size < least else size


def _precedes(chunks: list[int], one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Tells whether the first of `chunks` within some bounds comes before the first within others."""

    def first(bounds: tuple[int, int]) -> int:
        return next(i for i, chunk in enumerate(chunks) if bounds[0] <= chunk <= bounds[1])

    return first(one) < first(other)


def _fullest_of_few(times: list[tuple[int, int]], device: Device) -> int:
    """Returns `_fullest` of items, given their times and how many take as long."""
    resident, ctas, _, _ = device
    times.sort(reverse=True)
    step, at_least, fullest = times[0][0] // BINS + 1, 0, 0
    for time, count in times:
        at_least += count
        time = -(-at_least * ctas // resident) * (time // step * step)
        if time > fullest:
            fullest = time
    return fullest


def _split_size(visible: np.ndarray, longest: int, total: int, device: Device, capacity: Capacity) -> int | None:
    """Returns the best split size in kv tiles; None where no split pays. `longest`, `total`: of `visible`."""
    more, of = BALANCED
    sizes, costs, counts = _histogram(visible, longest)
    work = int(costs.dot(counts))
    share = work * device.ctas_per_item // device.resident_ctas
    unsplit = max(share, _fullest_unsplit(costs, counts, len(visible), device))
    if unsplit * of <= share * more:
        return None
    used = counts.nonzero()[0]
    sizes = sizes.take(used)
    sizes[0] = sizes[0] or 1  # others are above 0
    tiles = Tiles(sizes, counts.take(used), len(visible), work)
    chunks = candidates(longest, total, device)
    estimates = _makespans(tiles, chunks, device, capacity)
    best = int(estimates.argmin())
    if int(estimates[best]) * WORTHWHILE[1] > unsplit * WORTHWHILE[0]:
        return None
    return chunks[best]


def candidates(longest: int, total: int, device: Device) -> list[int]:
    """Returns the split sizes that are compared, in kv tiles, each once: of equal estimates the first wins."""
    least = _least(longest, device.min_split_tiles)
    debt, whole = -total * device.ctas_per_item, device.resident_ctas * SHARE_DENOMINATOR  # below 0: this rounds up
    sizes = [-(-longest // divisor) for divisor in LONGEST_DIVISORS]
    sizes += [-(debt * factor // whole) for factor in SHARE_FACTORS]
    return list(dict.fromkeys(least if size < least else longest if size > longest else size for size in sizes))


def _least(longest: int, min_split_tiles: int) -> int:
    """Returns the smallest split size, which is below the longest query tile: `_may_pay`."""
    return max(min_split_tiles, -(-longest // MAX_SPLITS))


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


def _fullest_unsplit(costs: np.ndarray, counts: np.ndarray, items: int, device: Device) -> int:
    """Returns the time of the fullest CTA of a launch without splits. `costs` ascend where `counts` are not 0."""
    if items * device.ctas_per_item <= device.resident_ctas:
        return largest(costs)
    waves = counts[::-1].cumsum() * -device.ctas_per_item // device.resident_ctas  # below 0: this rounds up
    return -smallest(waves * costs[::-1])


def _makespans(tiles: Tiles, chunks: list[int], device: Device, capacity: Capacity) -> np.ndarray:
    """Returns, for each split size in `chunks`, the makespan when every tile gets the fewest splits of at most this
    size; `IMPOSSIBLE` where the records exceed the capacity.

    Of arrays of a few numbers each operation takes the same time: they are as few as possible. Quotients that are to be
    rounded up are those of negative numbers.
    """
    sizes, ctas = tiles.sizes, device.ctas_per_item
    splits = -sizes // np.array(chunks)[:, None]  # negative
    is_split = splits < _MINUS_ONE
    cost = np.where(is_split, ITEM_TIME + device.partial_cost, ITEM_TIME)
    cost -= sizes // splits * _UNIT  # and the kv tiles of the longest split, which come out negative too
    splits *= -tiles.counts  # items
    longest = most(cost, 1)
    fullest, items = _fullest(cost, splits, longest, device)
    merges = is_split.dot(tiles.counts)
    partials = items + (merges - tiles.number)
    traffic = partials * (device.partial_cost * ctas)
    work = items * (ITEM_TIME * ctas) + traffic
    work += (tiles.work - tiles.number * ITEM_TIME) * ctas
    result = np.maximum(np.maximum(work // device.resident_ctas, fullest), longest)
    result += traffic // device.resident_ctas + COMBINE_TIME
    if (whole := int(sizes[-1])) in chunks:  # splits nothing
        result[chunks.index(whole)] -= COMBINE_TIME
    finest = chunks.index(min(chunks))  # has the most records of every kind
    if items[finest] > capacity.items or partials[finest] > capacity.partials or merges[finest] > capacity.merges:
        over = (partials > capacity.partials) | (items > capacity.items) | (merges > capacity.merges)
        result[over] = IMPOSSIBLE
    return result


def _fullest(cost: np.ndarray, items: np.ndarray, longest: np.ndarray, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """Returns the time of the fullest CTA of every row, which has `items` of each `cost`, rounded down to a fraction of
    the `longest`; and all items of the row.
    """
    step = (longest // _BINS + _ONE)[:, None]
    keys = items - (cost // step << _SHIFT)
    keys.sort(1)  # longest items first
    at_least = (keys & _MASK).cumsum(1)  # items of this cost or more, behind the last that is as long
    waves = at_least * -device.ctas_per_item // device.resident_ctas
    return most((keys >> _SHIFT) * step * waves, 1), at_least[:, -1]  # a product of two negative numbers
