"""The planner's CTA: parameters, shared memory, scans over all threads, and the query tiles of a batch.

What lengths say is clamped to the memory that the launch was given, so that no launch accesses other memory, whatever
the index arrays hold.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.plan.parts.arithmetic import (
    clamp,
    inclusive_sum,
    lane_before,
    load_shared_wide,
    quotient_up,
    store_shared_wide,
)
from cute_attn.schedule.constants import BINS, CANDIDATES, SORT_BINS

WARPS = 32
THREADS = 32 * WARPS


class PlanParams(NamedTuple):
    """Kernel parameters, in order. Addresses are Int64; all arrays are int32."""

    qo_indptr: Int64  # [batch_size + 1]; 0: every request has `q_len` query tokens
    kv_indptr: Int64  # [batch_size + 1], or with `kv_len` [batch_size]
    last_page_len: Int64  # [batch_size]; 0: kv_indptr counts tokens
    kv_len: Int64  # [batch_size]; 0: keys follow from the two before
    mask_offset: Int64  # [batch_size, 2]: low and high 32 bits; 0: no masks
    items: Int64  # records, written
    merges: Int64
    counts: Int64  # [4]: items and merges; read before they are written, unless `fresh`
    first_tile: Int64  # scratch: [batch_size + 1]
    groups: Int64  # [batch_size]
    tiles: Int64  # [max_tiles, 4]
    splits: Int64  # [item_capacity, 4]
    order: Int64  # [max(item_capacity, batch_size)]
    batch_size: Int32
    q_len: Int32
    fresh: Int32  # 1: the memory of records may hold anything; 0: what a launch with equal capacities has left
    max_rows: Int32  # of q
    max_kv: Int32  # rows of ragged k and v, or entries of kv_indices
    max_pages: Int32  # of one request
    page_size: Int32
    rows: Int32  # of the tile
    cols: Int32
    group_size: Int32
    num_kv_heads: Int32
    causal: Int32
    window_left: Int32  # at most 2^30; negative: none
    resident_ctas: Int32
    min_split_tiles: Int32
    partial_cost: Int32
    fixed_chunk: Int32  # kv tiles of a split of fixed size; 0: splits by the cost model
    l2_kv_tokens: Int32
    max_tiles: Int32  # query tiles
    item_capacity: Int32
    merge_capacity: Int32
    partial_capacity: Int32


class Smem:
    """Offsets in shared memory. Histograms of the cost model and those of a sort are not in use together."""

    longest = 0  # kv tiles of a query tile; of an item
    longest_item = 4
    longest_kv = 8  # tokens of a request
    unsplit = 16  # 64 bits each from here on
    share = 24
    total = 32  # kv tiles of all query tiles
    total_kv = 40  # tokens of all requests
    accumulators = 48  # bytes of the above
    estimates = 48
    chunks = estimates + 8 * CANDIDATES
    warp_sums = -(-(chunks + 4 * CANDIDATES) // 16) * 16  # 64 bits per warp
    histograms = warp_sums + 8 * WARPS
    sizes = histograms  # of the cost model: sizes and counts of bins
    bin_counts = sizes + 4 * BINS
    bytes = histograms + 4 * SORT_BINS * WARPS


@dataclass(frozen=True)
class Request:
    """Tokens of a request."""

    qo_start: Int32
    qo_len: Int32
    kv_start: Int32
    kv_len: Int32


@dataclass(frozen=True)
class Cta:
    """What all parts of the planner have in common."""

    p: Any
    base: Int32  # of shared memory
    thread: Int32

    @property
    def lane(self) -> Int32:
        return self.thread & Int32(31)

    @property
    def warp(self) -> Int32:
        return self.thread >> 5

    def segment(self, count: Int32) -> tuple[Int32, Int32]:
        """Returns the range of `count` numbers that this warp takes, in order of warps; a multiple of 32 but one."""
        size = quotient_up(count, Int32(THREADS)) * Int32(32)
        begin = ptx.minimum(self.warp * size, count)
        return begin, ptx.minimum(begin + size, count)

    @cute.jit
    def exclusive_sum(self, x: Any, most_: Any) -> Any:
        """Returns the sum over the threads before this one, and over all; both at most `most_`. For all threads."""
        sums = self.base + Int32(Smem.warp_sums)
        through = inclusive_sum(x, self.lane, most_)
        if self.lane == 31:
            store_shared_wide(sums + self.warp * Int32(8), 0, Int64(through))
        ptx.sync_threads()
        sums_through = inclusive_sum(load_shared_wide(sums + self.lane * 8), self.lane, Int64(most_))
        before = ptx.shuffle_from(lane_before(sums_through, self.lane), self.warp)
        total = ptx.shuffle_from(sums_through, Int32(WARPS - 1))
        ptx.sync_threads()  # the next sums overwrite these
        kind = type(x)
        return ptx.minimum(kind(before) + lane_before(through, self.lane), most_), kind(total)

    # ---- the batch

    def request(self, i: Int32) -> Request:
        """Returns the tokens of request i < batch_size, within the memory of the launch."""
        p, place = self.p, Int64(i) * Int64(4)
        ragged_q = p.qo_indptr != Int64(0)
        start = ptx.select(ragged_q, ptx.load_word_if(ragged_q, p.qo_indptr + place), i * p.q_len)
        stop = ptx.load_word_if(ragged_q, p.qo_indptr + place + Int64(4))
        stop = ptx.select(ragged_q, stop, start + p.q_len)
        start = clamp(start, Int32(0), p.max_rows)
        qo_len = clamp(stop, start, p.max_rows) - start
        paged = p.last_page_len != Int64(0)
        kv_start = clamp(ptx.ld_global_u32(p.kv_indptr + place), Int32(0), p.max_kv)
        kv_stop = clamp(ptx.ld_global_u32(p.kv_indptr + place + Int64(4)), kv_start, p.max_kv)
        count = ptx.minimum(kv_stop - kv_start, p.max_pages)
        last = clamp(ptx.load_word_if(paged, p.last_page_len + place), Int32(1), p.page_size)
        tokens = ptx.select(count > 0, (count - Int32(1)) * p.page_size + last, Int32(0))
        tokens = ptx.select(paged, tokens, count)
        given = p.kv_len != Int64(0)
        keys = clamp(ptx.load_word_if(given, p.kv_len + place), Int32(0), p.max_pages * p.page_size)
        return Request(start, qo_len, kv_start, ptx.select(given, keys, tokens))

    def visible(self, request: Request, first_row: Int32) -> tuple[Int32, Int32]:
        """Returns the range of kv tiles that some row of a query tile sees: `schedule.batch.visible_kv_tiles`."""
        p = self.p
        behind = request.kv_len - request.qo_len  # a token's position less its number
        last = ptx.minimum(ptx.divide(first_row + p.rows - Int32(1), p.group_size), request.qo_len - Int32(1))
        stop = ptx.select(p.causal != 0, ptx.maximum(last + behind + Int32(1), Int32(0)), request.kv_len)
        start = ptx.maximum(ptx.divide(first_row, p.group_size) + behind - p.window_left, Int32(0))
        begin = ptx.select(p.window_left < 0, Int32(0), ptx.divide(start, p.cols))
        return begin, quotient_up(stop, p.cols)

    @cute.jit
    def count_tiles(self) -> tuple[Int32, Int64, Int32]:
        """Stores the first query tile of every request. Returns the number of query tiles; and of keys the sum, and the
        most of one request.
        """
        p = self.p
        carry, keys, longest = Int32(0), Int64(0), Int32(0)
        if self.thread == 0:
            ptx.st_global_b32(p.first_tile, 0, Int32(0))
        for first in cutlass.range(0, p.batch_size, THREADS, unroll=1):
            i = first + self.thread
            tiles = Int32(0)
            if i < p.batch_size:
                request = self.request(i)
                tiles = ptx.minimum(quotient_up(request.qo_len * p.group_size, p.rows), p.max_tiles)
                keys = keys + Int64(request.kv_len)
                longest = ptx.maximum(longest, request.kv_len)
            before, total = self.exclusive_sum(tiles, p.max_tiles)
            if i < p.batch_size:
                through = ptx.minimum(carry + before + tiles, p.max_tiles)
                ptx.st_global_b32(p.first_tile + Int64(i) * Int64(4), 4, through)
            carry = ptx.minimum(carry + total, p.max_tiles)
        return carry, keys, longest

    @cute.jit
    def request_of(self, tile: Int32) -> Int32:
        """Returns the request of a query tile: the last one whose first tile is not after it."""
        low, high = Int32(0), self.p.batch_size
        while high - low > 1:
            middle = (low + high) >> 1
            after = ptx.ld_global_u32(self.p.first_tile + Int64(middle) * Int64(4)) > tile
            high = ptx.select(after, middle, high)
            low = ptx.select(after, low, middle)
        return low

    @cute.jit
    def make_tiles(self, num_tiles: Int32) -> tuple[Int32, Int64]:
        """Stores request, first row and visible kv tiles of every query tile. Returns this thread's largest number of
        visible kv tiles and their sum.
        """
        p = self.p
        longest, total = Int32(0), Int64(0)
        for tile in cutlass.range(self.thread, num_tiles, THREADS, unroll=1):
            i = self.request_of(tile)
            request = self.request(i)
            first_row = (tile - ptx.ld_global_u32(p.first_tile + Int64(i) * Int64(4))) * p.rows
            begin, end = self.visible(request, first_row)
            ptx.st_global_v4(p.tiles + Int64(tile) * Int64(16), 0, [i, first_row, begin, end])
            longest = ptx.maximum(longest, end - begin)
            total = total + Int64(end - begin)
        return longest, total
