"""Who does what: every CTA finds its own share on the device, from lengths that may change between graph replays.

A *segment* is one request and one unit: a kv head and a block of query rows. Segments lie on lines, each of which has
every request for some of the units. There a segment takes `overhead` positions for starting and finishing it, then one
for every tile of `cols` tokens that its rows can see. A line is cut into equal shares, one a CTA, so that lengths do
not matter: a CTA may finish one segment, do others whole, and start a last one. Cut segments are merged by the CTA
that comes last (`merge`).

The grid is [lines, shares of a line]. All lines are alike, and CTAs of the same share read the same tokens of different
heads at the same time: neighbours in the cache, of which several are in one line of the L2.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.xqa.parts import instructions as isa


class Share(NamedTuple):
    """The positions [begin, end) of this CTA on its line; every CTA has `size` of them, as long as the line lasts."""

    begin: Int32
    end: Int32
    size: Int32


class Request(NamedTuple):
    """Lengths of one request: zeros past the last one."""

    kv_len: Int32
    first_token: Int32  # no row sees an older one
    tiles: Int32
    qo_start: Int32
    qo_len: Int32


class Segment(NamedTuple):
    index: Int32  # of the request
    unit: Int32  # kv head * row blocks + row block
    start: Int32  # position of its first tile on its line
    first_page: Int32  # of the request: place of its index in the page table
    request: Request


@dataclass(frozen=True)
class Partition:
    p: Any  # XqaParams
    cols: int

    @property
    def line(self) -> Int32:
        """Has the units `line`, `line` + lines, ..."""
        return cute.arch.block_idx()[0]

    @cute.jit
    def request(self, index: Int32) -> Request:
        p = self.p
        exists = isa.below(index, p.batch)
        kv_len = isa.load_if(exists, p.seq_lens + Int64(index) * Int64(4), 0, 1)[0]
        kv_len = ptx.maximum(ptx.minimum(kv_len, p.capacity), Int32(0))  # never past the row of the page table
        qo_start, qo_len = index * p.q_len, ptx.select(exists, p.q_len, Int32(0))
        if p.q_indptr != Int64(0):
            bounds = p.q_indptr + Int64(index) * Int64(4)
            qo_start = isa.load_if(exists, bounds, 0, 1)[0]
            qo_len = isa.load_if(exists, bounds, 4, 1)[0] - qo_start
        first_token = ptx.maximum(kv_len - qo_len - p.window_left, Int32(0))
        tiles = (kv_len + (self.cols - 1)) // self.cols - first_token // self.cols
        return Request(kv_len, first_token, tiles, qo_start, qo_len)

    @cute.jit
    def first_page(self, index: Int32) -> Int32:
        """Page tables are rows of equal length, or one row in which every request has a place of its own."""
        p = self.p
        first = index * p.table_stride
        if p.page_starts != Int64(0):
            first = isa.load_if(isa.below(index, p.batch), p.page_starts + Int64(index) * Int64(4), 0, 1)[0]
        return first

    def cost(self, index: Int32) -> Int32:
        """Length of a request on the line."""
        cost = (self.request(index).tiles + self.p.overhead) * self.p.line_units
        return ptx.select(index < self.p.batch, cost, Int32(0))

    @cute.jit
    def locate(self) -> tuple[Share, Segment]:
        """This CTA's share, and the segment in which it begins. Every warp does it on its own: lane l adds up a run
        of requests, then the warp looks for the run and in it for the request."""
        p, lane = self.p, cute.arch.thread_idx()[0] & 31
        run = (p.batch + 31) >> 5
        cost = Int32(0)
        for i in cutlass.range(0, run, unroll=4):
            cost = cost + self.cost(lane * run + i)
        reach = cost
        for delta in cutlass.range_constexpr(5):
            other = isa.shuffle_up(reach, 1 << delta)
            reach = reach + ptx.select(lane >= 1 << delta, other, Int32(0))
        total = isa.shuffle(reach, Int32(31))
        share = self.share(total)
        ended = isa.count_ones(isa.ballot(reach <= share.begin))  # all 32: a share past the last request
        holder = ptx.minimum(ended, Int32(31))
        before = isa.shuffle(reach - cost, holder)
        index, passed = ptx.select(run == 1, ended, holder * run), before
        for i in cutlass.range(0, ptx.select(run == 1, Int32(0), run), unroll=4):
            passed = passed + self.cost(holder * run + i)
            behind = passed <= share.begin
            index = index + ptx.select(behind, Int32(1), Int32(0))
            before = ptx.select(behind, passed, before)
        request, first_page = self.request(index), self.first_page(index)
        length = request.tiles + p.overhead
        passed = Int32(0)
        if p.line_units > 1:
            passed = isa.divide(share.begin - before, length)
        unit = passed * cute.arch.grid_dim()[0] + self.line
        return share, Segment(index, unit, before + passed * length + p.overhead, first_page, request)

    def share(self, total: Int32) -> Share:
        ctas, cta = cute.arch.grid_dim()[1], cute.arch.block_idx()[1]
        divisor = Divisor(ctas, self.p.shares_multiplier, self.p.shares_shift)
        size = ptx.maximum(self.p.min_share, divisor.quotient(total + ctas - 1))
        begin = cta * size
        return Share(begin, ptx.select(begin < total, ptx.minimum(begin + size, total), Int32(0)), size)

    def reaches(self, segment: Segment, share: Share) -> Boolean:
        return segment.start - self.p.overhead < share.end

    @cute.jit
    def after(self, segment: Segment) -> Segment:
        """The next segment on the line."""
        start = segment.start + segment.request.tiles + self.p.overhead
        unit = segment.unit + cute.arch.grid_dim()[0]
        following = Segment(segment.index, unit, start, segment.first_page, segment.request)
        if following.unit >= self.p.num_kv_heads * self.p.row_blocks:
            index = segment.index + 1
            following = Segment(index, self.line, start, self.first_page(index), self.request(index))
        return following


class Part(NamedTuple):
    """What a share has of a segment: tiles [begin, end), counted from the segment's first."""

    begin: Int32
    end: Int32
    whole: Boolean  # all of it, perhaps nothing: this CTA writes the output itself
    active: Boolean  # tiles, or the duty to write zeros


def part(segment: Segment, share: Share) -> Part:
    tiles = segment.request.tiles
    begin = ptx.maximum(share.begin - segment.start, Int32(0))
    end = ptx.minimum(share.end - segment.start, tiles)
    # A segment without tiles belongs to the share that has its last unit of overhead.
    last = segment.start - 1
    empty = isa.all_of([tiles == 0, share.begin <= last, last < share.end])
    whole = cutlass.or_(isa.all_of([begin == 0, end == tiles, tiles > 0]), empty)
    return Part(begin, end, whole, cutlass.or_(begin < end, empty))
