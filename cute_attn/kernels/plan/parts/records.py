"""Splits of query tiles, their order, and the records of items and merges.

The order is a stable counting sort of keys from 0 to 255 by all threads. Every warp takes a segment of the input in
order. The first pass counts its keys; sums over keys and warps say where the segment's numbers of each key begin; the
second pass places them, 32 at a time.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.plan.parts.arithmetic import add_shared, equal_lanes, inclusive_sum, quotient_up, wide_quotient
from cute_attn.kernels.plan.parts.cta import THREADS, WARPS, Cta, Smem
from cute_attn.schedule.constants import L2_ORDER_MIN_WAVES, SORT_BINS
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL

NO_LIMIT = (1 << 31) - 1


@cute.jit
def sort(cta: cutlass.Constexpr, count: Int32, key: cutlass.Constexpr, place: cutlass.Constexpr) -> None:
    """Calls `place(i, position)` for every i < count; positions ascend by `key(i)`, then by i.

    The caller synchronises before (what keys read) and after (what places write).
    """
    counts = cta.base + Int32(Smem.histograms) + cta.warp * Int32(4 * SORT_BINS)
    _count_keys(cta, count, key, counts)
    _start_positions(cta)
    begin, end = cta.segment(count)
    for first in cutlass.range(begin, end, 32):
        i = first + cta.lane
        exists = i < end
        mine = Int32(SORT_BINS)  # of lanes past the end
        if exists:
            mine = key(i)
        equal = equal_lanes(mine)
        rank = ptx.count_ones(equal & ((Int32(1) << cta.lane) - Int32(1)))
        start = Int32(0)
        if exists:
            start = ptx.ld_shared_b32(counts + mine * 4)
        ptx.sync_warp()
        if cutlass.and_(exists, rank == 0):
            add_shared(counts + mine * 4, ptx.count_ones(equal))
        ptx.sync_warp()
        if exists:
            place(i, start + rank)


@cute.jit
def _count_keys(cta: cutlass.Constexpr, count: Int32, key: cutlass.Constexpr, counts: Int32) -> None:
    for step in cutlass.range(SORT_BINS // 32, unroll=1):
        ptx.st_shared_b32(counts + (step * 32 + cta.lane) * 4, 0, Int32(0))
    ptx.sync_warp()
    begin, end = cta.segment(count)
    for i in cutlass.range(begin + cta.lane, end, 32):
        add_shared(counts + key(i) * 4, Int32(1))
    ptx.sync_threads()


@cute.jit
def _start_positions(cta: cutlass.Constexpr) -> None:
    """Replaces the counts of every warp by the positions of its first numbers."""
    column = cta.base + Int32(Smem.histograms) + cta.thread * 4
    total = Int32(0)
    if cta.thread < SORT_BINS:
        for warp in cutlass.range(WARPS, unroll=4):
            total = total + ptx.ld_shared_b32(column + warp * Int32(4 * SORT_BINS))
    start, _ = cta.exclusive_sum(total, Int32(NO_LIMIT))
    if cta.thread < SORT_BINS:
        for warp in cutlass.range(WARPS, unroll=4):
            here = column + warp * Int32(4 * SORT_BINS)
            count = ptx.ld_shared_b32(here)
            ptx.st_shared_b32(here, 0, start)
            start = start + count
    ptx.sync_threads()


# --- records ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """`chunk`: kv tiles of the longest split by the cost model, of the query tiles from `first` on; 0: none, or those
    of `fixed_chunk`.
    """

    cta: Cta
    first: Int32
    chunk: Int32

    def splits_of(self, tile: Int32, begin: Int32, end: Int32) -> Int32:
        """Returns the number of splits of a query tile that sees the kv tiles [begin, end)."""
        fixed = self.cta.p.fixed_chunk
        size = ptx.maximum(ptx.select(fixed != 0, fixed, self.chunk), Int32(1))
        whole = ptx.select(fixed != 0, quotient_up(end, size) - ptx.divide(begin, size), quotient_up(end - begin, size))
        none = cutlass.and_(fixed == 0, cutlass.or_(self.chunk == 0, tile < self.first))
        return ptx.select(none, Int32(1), ptx.maximum(whole, Int32(1)))

    @cute.jit
    def make_splits(self, num_tiles: Int32) -> tuple[Int32, Int32, Int32]:
        """Stores kv tiles, query tile and partial of every item, in the order of tiles, and writes the merge records.
        Returns the number of items and of merges, and the kv tiles of this thread's longest item.
        """
        cta, p = self.cta, self.cta.p
        begin, end = cta.segment(num_tiles)
        items, partials, merges = Int32(0), Int32(0), Int32(0)
        for tile in cutlass.range(begin + cta.lane, end, 32):
            first, last = ptx.ld_global_v2(p.tiles + Int64(tile) * Int64(16), 8)
            splits = self.splits_of(tile, first, last)
            items = items + splits
            partials = partials + ptx.select(splits > 1, splits, Int32(0))
            merges = merges + ptx.flag(splits > 1)
        item, num_items = self.before_warp(items)
        partial, _ = self.before_warp(partials)
        merge, num_merges = self.before_warp(merges)
        longest = Int32(0)
        for of_warp in cutlass.range(begin, end, 32):
            tile = of_warp + cta.lane
            splits, i, first_row, first, last = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
            if tile < end:
                i, first_row, first, last = ptx.ld_global_v4(p.tiles + Int64(tile) * Int64(16), 0)
                splits = self.splits_of(tile, first, last)
            several = ptx.flag(splits > 1)
            items = item + inclusive_sum(splits, cta.lane, Int32(NO_LIMIT))
            partials = partial + inclusive_sum(splits * several, cta.lane, Int32(NO_LIMIT))
            merges = merge + inclusive_sum(several, cta.lane, Int32(NO_LIMIT))
            my_item, my_partial, my_merge = items - splits, partials - splits * several, merges - several
            my_partial = ptx.maximum(ptx.minimum(my_partial, p.partial_capacity - splits), Int32(0))
            if cutlass.and_(splits > 1, my_merge < p.merge_capacity):
                self.write_merge(my_merge, i, first_row, my_partial, splits)
            for j in cutlass.range(splits):
                slot = ptx.select(splits > 1, my_partial + j, Int32(NO_PARTIAL))
                cost = self.store_split(my_item + j, tile, first, last, j, splits, slot)
                longest = ptx.maximum(longest, cost)
            item = ptx.shuffle_from(items, Int32(31))
            partial = ptx.shuffle_from(partials, Int32(31))
            merge = ptx.shuffle_from(merges, Int32(31))
        return num_items, num_merges, longest

    def before_warp(self, x: Int32) -> tuple[Int32, Int32]:
        """Returns the sum over the threads of the warps before this one, and over all threads."""
        before, total = self.cta.exclusive_sum(x, Int32(NO_LIMIT))
        return ptx.shuffle_from(before, Int32(0)), total

    @cute.jit
    def store_split(
        self, item: Int32, tile: Int32, first: Int32, last: Int32, j: Int32, splits: Int32, slot: Int32
    ) -> Int32:
        """Stores split j of a query tile that sees the kv tiles [first, last). Returns its kv tiles."""
        p = self.cta.p
        visible = last - first
        begin = first + ptx.divide(j * visible, splits)
        end = first + ptx.divide((j + Int32(1)) * visible, splits)
        size = ptx.maximum(p.fixed_chunk, Int32(1))
        start = (ptx.divide(first, size) + j) * size
        fixed = p.fixed_chunk != 0
        begin = ptx.select(fixed, ptx.maximum(start, first), begin)
        end = ptx.select(fixed, ptx.minimum(start + size, last), end)
        if item < p.item_capacity:
            ptx.st_global_v4(p.splits + Int64(item) * Int64(16), 0, [begin, end, tile, slot])
        return end - begin

    def write_merge(self, merge: Int32, i: Int32, first_row: Int32, partial: Int32, splits: Int32) -> None:
        request, zero = self.cta.request(i), Int32(0)
        record = self.cta.p.merges + Int64(merge) * Int64(4 * MERGE_INTS)
        ptx.st_global_v4(record, 0, [request.qo_start, request.qo_len, first_row, partial])
        ptx.st_global_v4(record, 16, [splits, zero, zero, zero])

    def write_item(self, split: Int32, position: Int32) -> None:
        """Writes the record of a split."""
        p, zero = self.cta.p, Int32(0)
        begin, end, tile, slot = ptx.ld_global_v4(p.splits + Int64(split) * Int64(16), 0)
        i, first_row = ptx.ld_global_v2(p.tiles + Int64(tile) * Int64(16), 0)
        request = self.cta.request(i)
        record = p.items + Int64(position) * Int64(4 * ITEM_INTS)
        kv_begin, kv_end = begin * p.cols, ptx.minimum(end * p.cols, request.kv_len)
        ptx.st_global_v4(record, 0, [request.qo_start, request.qo_len, request.kv_start, request.kv_len])
        ptx.st_global_v4(record, 16, [first_row, kv_begin, kv_end, slot])
        masked, place = p.mask_offset != Int64(0), p.mask_offset + Int64(i) * Int64(8)
        low, high = ptx.load_word_if(masked, place), ptx.load_word_if(masked, place + Int64(4))
        ptx.st_global_v4(record, 32, [low, high, i, zero])
        ptx.st_global_v4(record, 48, [zero, zero, zero, zero])

    # ---- order

    @cute.jit
    def write_items(self, count: Int32, merges: Int32, longest: Int32, longest_kv: Int32, total_kv: Int64) -> None:
        """Writes the records of all items: longest first, within groups of requests that share L2 where these matter.

        `merges`: number of merge records. `longest`: kv tiles of the longest item. `longest_kv`, `total_kv`: tokens of
        the longest request, and of all.
        """
        cta, p = self.cta, self.cta.p
        width = ptx.divide(longest, Int32(SORT_BINS)) + Int32(1)

        def cost_key(split: Int32) -> Int32:
            begin, end = ptx.ld_global_v2(p.splits + Int64(split) * Int64(16), 0)
            return Int32(SORT_BINS - 1) - ptx.divide(end - begin, width)

        many = Int64(count) * Int64(p.num_kv_heads) >= Int64(p.resident_ctas) * Int64(L2_ORDER_MIN_WAVES)
        grouped = cutlass.and_(p.l2_kv_tokens != 0, total_kv > Int64(p.l2_kv_tokens))
        whole = cutlass.or_(p.fixed_chunk != 0, merges == 0)  # parts by the cost model come last
        if cutlass.and_(cutlass.and_(many, grouped), whole):
            self.write_groups(longest_kv, total_kv)
            sort(cta, count, cost_key, self.store_order)
            ptx.sync_threads()
            sort(cta, count, self.group_of, self.write_ordered)
        else:
            sort(cta, count, cost_key, self.write_item)

    def store_order(self, i: Int32, position: Int32) -> None:
        ptx.st_global_b32(self.cta.p.order + Int64(position) * Int64(4), 0, i)

    def ordered(self, i: Int32) -> Int32:
        return ptx.ld_global_u32(self.cta.p.order + Int64(i) * Int64(4))

    def group_of(self, i: Int32) -> Int32:
        p = self.cta.p
        tile = ptx.ld_global_u32(p.splits + Int64(self.ordered(i)) * Int64(16) + Int64(8))
        request = ptx.ld_global_u32(p.tiles + Int64(tile) * Int64(16))
        return ptx.ld_global_u32(p.groups + Int64(request) * Int64(4))

    def write_ordered(self, i: Int32, position: Int32) -> None:
        self.write_item(self.ordered(i), position)

    @cute.jit
    def write_groups(self, longest_kv: Int32, total_kv: Int64) -> None:
        """Writes the L2 group of every request, longest requests first: the keys of one group fit L2 together, unless
        there are more than 256 times as many. A barrier must come before groups are read.
        """
        cta, p = self.cta, self.cta.p
        width = ptx.divide(longest_kv, Int32(SORT_BINS)) + Int32(1)

        def length_key(i: Int32) -> Int32:
            return Int32(SORT_BINS - 1) - ptx.divide(cta.request(i).kv_len, width)

        sort(cta, p.batch_size, length_key, self.store_order)
        ptx.sync_threads()
        least_tokens = wide_quotient(total_kv - Int64(1), Int64(SORT_BINS)) + Int64(1)
        tokens = ptx.maximum(Int64(p.l2_kv_tokens), least_tokens)
        carry, first = Int64(0), Int32(0)
        while first < p.batch_size:
            position = first + cta.thread
            kv_len, i = Int64(0), Int32(0)
            if position < p.batch_size:
                i = self.ordered(position)
                kv_len = Int64(cta.request(i).kv_len)
            before, total = cta.exclusive_sum(kv_len, Int64(1 << 60))
            if position < p.batch_size:
                end = ptx.maximum(carry + before + kv_len - Int64(1), Int64(0))
                ptx.st_global_b32(p.groups + Int64(i) * Int64(4), 0, Int32(wide_quotient(end, tokens)))
            carry = carry + total
            first = first + Int32(THREADS)
