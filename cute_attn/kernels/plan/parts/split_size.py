"""Number of splits of each query tile of a batch: a search over split sizes, of all tiles or of those of the last wave,
with a model of the makespan.

A device runs a number of items at once and starts the next one, longest first, where one ends. The makespan of splits
is estimated as the largest of three: the longest item, the work shared equally, and the long items wave by wave, those
of more than half the time of the longest; shorter ones fill what waves leave free. Without splits the third is the
fullest CTA: when `count` items cost `cost` or more, some CTA runs `ceil(count / concurrent_items)` of them. How close
schedules come to the best: `tests/schedule/test_makespan.py`.

All arithmetic is in integers, and every division is of numbers >= 0 and rounds down. Times count `UNIT`ths of a kv
tile.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.plan.parts.arithmetic import (
    add_shared,
    inclusive_sum,
    load_shared_wide,
    quotient_up,
    raise_shared,
    store_shared_wide,
    warp_max,
    warp_sum,
    wide_quotient,
)
from cute_attn.kernels.plan.parts.cta import THREADS, WARPS, Cta, Smem
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
from cute_attn.schedule.records import MAX_SPLITS

STEPS = BINS // 32  # of a warp over all bins
NO_LIMIT = (1 << 31) - 1
LANES = 32


class Cut(NamedTuple):
    """Query tiles from `first` on are split into parts of at most `size` kv tiles. `size` 0: none is split."""

    time: Int64
    first: Int32
    size: Int32


def last_wave(p: Any, lane: Int32, num_tiles: Int32, longest: Int32) -> Cut:
    """Returns the best cut, for all lanes: each estimates one number of parts. `time` IMPOSSIBLE: there is none."""
    waves = ptx.divide(num_tiles * p.num_kv_heads, p.resident_ctas)
    first = ptx.divide(waves * p.resident_ctas, p.num_kv_heads)
    tiles, idle = num_tiles - first, waves * p.resident_ctas - first * p.num_kv_heads
    size = ptx.maximum(quotient_up(longest, lane + Int32(2)), Int32(1))
    parts = tiles * quotient_up(longest, size)
    whole = longest * Int32(UNIT) + Int32(ITEM_TIME)
    part = size * Int32(UNIT) + Int32(ITEM_TIME) + p.partial_cost
    late = ptx.maximum(parts * p.num_kv_heads - idle * ptx.divide(whole, part), Int32(0))
    time = Int64(waves) * Int64(whole) + Int64(quotient_up(late, p.resident_ctas)) * Int64(part)
    traffic = wide_quotient(Int64(parts * p.num_kv_heads) * Int64(p.partial_cost), Int64(p.resident_ctas))
    time = time + Int64(COMBINE_TIME) + traffic
    conditions = (
        lane < MOST_PARTS - 1,
        cutlass.and_(first > 0, waves * p.resident_ctas < num_tiles * p.num_kv_heads),
        size >= p.min_split_tiles,
        tiles <= p.merge_capacity,
        parts <= p.partial_capacity,
        first + parts <= p.item_capacity,
    )
    time = ptx.select(reduce(cutlass.and_, conditions), time, Int64(IMPOSSIBLE))
    best = Int64(0) - warp_max(Int64(0) - (time * Int64(LANES) + Int64(lane)))
    time = wide_quotient(best, Int64(LANES))
    lane = Int32(best - time * Int64(LANES))
    return Cut(time, first, quotient_up(longest, lane + Int32(2)))


@dataclass(frozen=True)
class SplitSize:
    """The search of one batch. `longest`, `total`: visible kv tiles of a query tile, and of all."""

    cta: Cta
    longest: Int32
    total: Int64

    @cute.jit
    def find(self, num_tiles: Int32) -> tuple[Int32, Int32]:
        """Returns the first query tile that is split, and the kv tiles of the longest split, 0 where no split pays. For
        all threads.
        """
        p = self.cta.p
        more, whole = BALANCED
        fits = ptx.minimum(p.merge_capacity, p.partial_capacity >> 1) >= 1
        long = self.longest >= p.min_split_tiles + p.min_split_tiles
        mine = Int64(self.longest) * Int64(p.resident_ctas) * Int64(whole)
        few_waves = mine > self.total * Int64(p.num_kv_heads) * Int64(more - whole)
        first, chunk = Int32(0), Int32(0)
        if cutlass.and_(cutlass.and_(fits, long), few_waves):
            self.fill_bins(num_tiles)
            if self.cta.warp == WARPS - 1:
                self.unsplit()
            for index in cutlass.range(self.cta.warp, CANDIDATES, WARPS, unroll=1):
                self.estimate(index)
            ptx.sync_threads()
            first, chunk = self.best(last_wave(p, self.cta.lane, num_tiles, self.longest))
        return first, chunk

    @cute.jit
    def fill_bins(self, num_tiles: Int32) -> None:
        """Writes the candidates, and sizes and counts of the bins of query tiles."""
        cta = self.cta
        for word in cutlass.range(cta.thread, BINS * 2, THREADS, unroll=1):
            ptx.st_shared_b32(cta.base + Int32(Smem.histograms) + word * 4, 0, Int32(0))
        if cta.thread < CANDIDATES:
            ptx.st_shared_b32(cta.base + Int32(Smem.chunks) + cta.thread * 4, 0, self.candidate(cta.thread))
        ptx.sync_threads()
        width = ptx.divide(self.longest, Int32(BINS)) + Int32(1)
        for tile in cutlass.range(cta.thread, num_tiles, THREADS, unroll=1):
            begin, end = ptx.ld_global_v2(cta.p.tiles + Int64(tile) * Int64(16), 8)
            place = cta.base + ptx.divide(end - begin, width) * 4
            raise_shared(place + Int32(Smem.sizes), end - begin)
            add_shared(place + Int32(Smem.bin_counts), Int32(1))
        ptx.sync_threads()

    def candidate(self, index: Int32) -> Int32:
        """Returns candidate `index` for the split size."""
        p = self.cta.p
        number = Int32(1)
        for i, constant in enumerate((*LONGEST_DIVISORS, *SHARE_FACTORS)):
            number = ptx.select(index == i, Int32(constant), number)
        whole = Int64(p.resident_ctas) * Int64(SHARE_DENOMINATOR)
        work = self.total * Int64(p.num_kv_heads) * Int64(number) + whole - Int64(1)
        of_share = Int32(ptx.minimum(wide_quotient(work, whole), Int64(self.longest)))
        size = ptx.select(index < len(LONGEST_DIVISORS), quotient_up(self.longest, number), of_share)
        smallest = ptx.maximum(p.min_split_tiles, quotient_up(self.longest, Int32(MAX_SPLITS)))
        return ptx.minimum(ptx.maximum(size, smallest), self.longest)

    def bin(self, index: Int32) -> tuple[Int32, Int32]:
        """Returns size and count of a bin. A query tile that sees no keys counts as one kv tile."""
        place = self.cta.base + index * 4
        size = ptx.maximum(ptx.ld_shared_b32(place + Int32(Smem.sizes)), Int32(1))
        return size, ptx.ld_shared_b32(place + Int32(Smem.bin_counts))

    def share_of(self, work: Int64) -> Int64:
        p = self.cta.p
        return wide_quotient(work * Int64(p.num_kv_heads), Int64(p.resident_ctas))

    def waves(self, items: Int32) -> Int64:
        p = self.cta.p
        return Int64(quotient_up(items * p.num_kv_heads, p.resident_ctas))

    @cute.jit
    def unsplit(self) -> None:
        """Writes the makespan of a launch without splits, and one CTA's equal share of its work. For one warp."""
        lane = self.cta.lane
        work, fullest, carry = Int64(0), Int64(0), Int32(0)
        for step in cutlass.range(STEPS, unroll=1):
            size, count = self.bin(Int32(BINS - 1) - (step * 32 + lane))  # longest first
            cost = Int64(size * Int32(UNIT) + Int32(ITEM_TIME))
            at_least = carry + inclusive_sum(count, lane, Int32(NO_LIMIT))
            fullest = ptx.maximum(fullest, self.waves(at_least) * cost)
            work = work + cost * Int64(count)
            carry = ptx.shuffle_from(at_least, Int32(31))
        share = self.share_of(warp_sum(work))
        fullest = warp_max(fullest)
        if lane == 0:
            store_shared_wide(self.cta.base + Int32(Smem.unsplit), 0, ptx.maximum(share, fullest))
            store_shared_wide(self.cta.base + Int32(Smem.share), 0, share)

    @cute.jit
    def estimate(self, index: Int32) -> None:
        """Writes the makespan with candidate `index`. For one warp."""
        p, lane = self.cta.p, self.cta.lane
        chunk = ptx.ld_shared_b32(self.cta.base + Int32(Smem.chunks) + index * 4)
        items, partials, merges = Int32(0), Int32(0), Int32(0)
        longest, work = Int32(0), Int64(0)
        for step in cutlass.range(STEPS, unroll=1):
            size, count = self.bin(step * 32 + lane)
            splits, cost = self.item(size, chunk)
            longest = ptx.maximum(longest, cost)
            items = items + splits * count
            partials = partials + ptx.select(splits > 1, splits * count, Int32(0))
            merges = merges + ptx.select(splits > 1, count, Int32(0))
            work = work + Int64(splits * count) * Int64(cost)
        longest, items, partials = warp_max(longest), warp_sum(items), warp_sum(partials)
        merges, work = warp_sum(merges), warp_sum(work)
        number, time = Int32(0), Int64(0)  # of the items of more than half the time of the longest
        for step in cutlass.range(STEPS, unroll=1):
            size, count = self.bin(step * 32 + lane)
            splits, cost = self.item(size, chunk)
            long = ptx.select(cost + cost > longest, splits * count, Int32(0))
            number, time = number + long, time + Int64(long) * Int64(cost)
        number, time = warp_sum(number), warp_sum(time)
        in_waves = self.waves(number) * wide_quotient(time, Int64(number))
        result = ptx.maximum(ptx.maximum(self.share_of(work), in_waves), Int64(longest))
        merging = Int64(COMBINE_TIME) + self.share_of(Int64(partials) * Int64(p.partial_cost))
        result = result + ptx.select(partials > 0, merging, Int64(0))
        over = cutlass.or_(partials > p.partial_capacity, items > p.item_capacity)
        result = ptx.select(cutlass.or_(over, merges > p.merge_capacity), Int64(IMPOSSIBLE), result)
        if lane == 0:
            store_shared_wide(self.cta.base + Int32(Smem.estimates) + index * 8, 0, result)

    def item(self, size: Int32, chunk: Int32) -> tuple[Int32, Int32]:
        """Returns the splits of a query tile that sees `size` kv tiles, and the time of the longest."""
        splits = quotient_up(size, chunk)
        cost = quotient_up(size, splits) * Int32(UNIT) + Int32(ITEM_TIME)
        return splits, cost + ptx.select(splits > 1, self.cta.p.partial_cost, Int32(0))

    def best(self, last: Cut) -> tuple[Int32, Int32]:
        """Returns the first query tile that is split, and the kv tiles of the longest split: those of the first of the
        candidates with the shortest makespan, or of the last wave; 0 where none is worthwhile.
        """
        base = self.cta.base
        estimates: list[Any] = [load_shared_wide(base + Int32(Smem.estimates + 8 * i)) for i in range(CANDIDATES)]
        shortest, chunk = estimates[0], ptx.ld_shared_b32(base + Int32(Smem.chunks))
        for i in range(1, CANDIDATES):
            shorter = estimates[i] < shortest
            shortest = ptx.select(shorter, estimates[i], shortest)
            chunk = ptx.select(shorter, ptx.ld_shared_b32(base + Int32(Smem.chunks + 4 * i)), chunk)
        unsplit, share = (load_shared_wide(base + Int32(at)) for at in (Smem.unsplit, Smem.share))
        unbalanced = unsplit * Int64(BALANCED[1]) > share * Int64(BALANCED[0])
        pays = cutlass.and_(unbalanced, shortest * Int64(WORTHWHILE[1]) <= unsplit * Int64(WORTHWHILE[0]))
        cut = last.time * Int64(CUT_WORTHWHILE[1]) <= unsplit * Int64(CUT_WORTHWHILE[0])
        cut = cutlass.and_(unbalanced, cutlass.and_(cut, last.time < ptx.select(pays, shortest, Int64(IMPOSSIBLE))))
        chunk = ptx.select(cut, last.size, ptx.select(pays, chunk, Int32(0)))
        return ptx.select(cut, last.first, Int32(0)), chunk
