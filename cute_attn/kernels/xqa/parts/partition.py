"""Work partition in the manner of stream-K: every CTA computes its own share on the device, because lengths may change
between graph replays.

A *unit* is a kv head and a block of query rows; a *segment* is one request and one unit. Units are dealt out to CTA
groups, each of which processes its units of every request. A group's segments form one sequence of positions: a segment
takes `overhead` positions, the cost of starting and finishing it, then one per tile of `cols` tokens that its rows can
see. The sequence is cut into equal shares, one per CTA, which balances the load whatever the lengths: a CTA may finish
one segment, process others whole, and start a last one. The CTA that arrives last merges a segment that was cut
(`merge`).

The grid is [CTA groups, shares of a group]. All groups have equal sequences, so that CTAs with the same share number
read the same tokens of different heads at the same time: those lie side by side in the cache and share lines of L2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import cluster, ptx
from cute_attn.kernels.blocks.rows import Divisor, PackedRows
from cute_attn.kernels.blocks.scalars import warp_index
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.spec import DecodeSpec, XqaSpec


class Share(NamedTuple):
    """Positions [begin, end) of this CTA in its group's sequence. Every CTA has `size` of them, up to the sequence's
    end."""

    begin: Int32
    end: Int32
    size: Int32
    pitch: Int32 | int = 0  # positions of every segment, see `EvenPartition`; 0: a segment has those that it needs


class Costs(NamedTuple):
    """Positions of the requests in the sequence of the CTA group, counted by a warp: each lane has a run of them."""

    run: Int32  # requests of a lane
    own: Int32  # positions of this lane's requests
    reach: Int32  # of these and of all before them
    longest: Int32  # most positions of one of this lane's requests


class Request(NamedTuple):
    """Lengths of one request; zeros past the last request."""

    kv_len: Int32
    first_token: Int32  # no row sees an older one
    tiles: Int32
    qo_start: Int32
    qo_len: Int32


class Segment(NamedTuple):
    """One request and one unit of it."""

    index: Int32  # of the request
    unit: Int32  # kv head * row blocks + row block
    start: Int32  # position of its first tile in the sequence of the CTA group
    first_page: Int32  # index in the page table of the request's first page id
    request: Request


class KvSplit(NamedTuple):
    """Tiles [begin, end) of a segment that one CTA processes, counted from the segment's first tile."""

    begin: Int32
    end: Int32
    whole: Boolean  # the split is the whole segment, perhaps empty: this CTA writes the output itself
    active: Boolean  # has tiles, or must write zeros for a request without keys

    @property
    def tiles(self) -> Int32:
        return self.end - self.begin


Load = Callable[[Boolean, Int64, int], Int32]  # a word behind an address and an offset, or 0 where it does not exist


@dataclass(frozen=True)
class Partition:
    """Device-side partition into equal shares."""

    p: Any  # XqaParams
    spec: DecodeSpec
    load: Load = field(default=ptx.load_word_if, kw_only=True)

    @property
    def cta_group(self) -> Int32:
        """Index of this CTA's group, which has units `cta_group`, `cta_group` + number of groups, ..."""
        return cute.arch.block_idx()[0]

    @property
    def first_unit(self) -> Int32:
        """First unit of this warp. Where each has its own, the warps of a CTA read the same tokens of adjacent units,
        which lie side by side in the cache: all of a token is read at about the same time."""
        units = self.spec.heads
        return self.cta_group if units == 1 else self.cta_group * units + warp_index()

    def request(self, index: Int32) -> Request:
        return self.request_of(index, self.kv_len(index))

    def kv_len(self, index: Int32) -> Int32:
        p = self.p
        kv_len = self.load(isa.less_unsigned(index, p.batch), p.seq_lens + Int64(index) * Int64(4), 0)
        return ptx.maximum(ptx.minimum(kv_len, p.capacity), Int32(0))  # never past the row of the page table

    @cute.jit
    def request_of(self, index: Int32, kv_len: Int32) -> Request:
        p, cols = self.p, self.spec.cols
        exists = isa.less_unsigned(index, p.batch)
        qo_start, qo_len = index * p.q_len, ptx.select(exists, p.q_len, Int32(0))
        if p.q_indptr != Int64(0):
            bounds = p.q_indptr + Int64(index) * Int64(4)
            qo_start = self.load(exists, bounds, 0)
            qo_len = ptx.maximum(self.load(exists, bounds, 4) - qo_start, Int32(0))  # bounds may be wrong ones
        first_token = ptx.maximum(kv_len - qo_len - p.window_left, Int32(0))
        tiles = (kv_len + (cols - 1)) // cols - first_token // cols
        return Request(kv_len, first_token, tiles, qo_start, qo_len)

    def head(self, unit: Int32) -> Int32:
        """Kv head of a unit."""
        return self.p.row_blocks.quotient(unit)

    def rows(self, segment: Segment) -> PackedRows:
        """Packed rows of a segment: the query heads of a GQA group, token by token."""
        p = self.p
        head = self.head(segment.unit)
        block = segment.unit - head * p.row_blocks.value
        count, start = segment.request.qo_len * p.group.value, segment.request.qo_start
        return PackedRows(block * self.spec.rows, count, p.group, head * p.group.value, start)

    @cute.jit
    def first_page(self, index: Int32) -> Int32:
        """Index of a request's first page id. Page tables have rows of equal length or are ragged (`page_starts`)."""
        p = self.p
        first = index * p.table_stride
        if p.page_starts != Int64(0):
            first = self.load(isa.less_unsigned(index, p.batch), p.page_starts + Int64(index) * Int64(4), 0)
        return first

    def prefetch_lengths(self) -> None:
        """Fetch into L2 what this CTA reads first, before the preceding kernel has ended, which may still write it.
        Nothing, where CTAs read the lengths of many requests."""

    @cute.jit
    def prefetch_request(self, index: Int32) -> None:
        """Fetch a request's length and first page, and the sinks of this CTA's heads, which it reads last: all CTAs
        would wait for them in memory at the same time."""
        p, offset = self.p, Int64(index) * Int64(4)
        if cute.arch.thread_idx()[0] == 0:
            isa.prefetch_l2(p.seq_lens + offset)
            if p.page_starts != Int64(0):
                isa.prefetch_l2(p.page_starts + offset)
            else:
                isa.prefetch_l2(p.table + offset * Int64(p.table_stride))
            if p.sinks != Int64(0):
                head = self.head(self.cta_group * self.spec.heads)  # the CTA's: `warp_index` needs all lanes
                isa.prefetch_l2(isa.mad_wide(head * p.group.value, Int32(4), p.sinks))

    def cost(self, index: Int32) -> Int32:
        """Number of positions that a request takes in the sequence of the CTA group."""
        cost = (self.request(index).tiles + self.p.overhead) * self.p.units_per_cta_group
        return ptx.select(index < self.p.batch, cost, Int32(0))

    def first_segment(self) -> tuple[Share, Segment]:
        """This CTA's share, and the segment in which it begins. Every warp computes both on its own."""
        return self.found(self.seen())

    def seen(self) -> list[Int32]:
        """What tells the share of a few requests: each lane reads its own part of it, all at once."""
        return []

    @cute.jit
    def found(self, seen: list[Int32]) -> tuple[Share, Segment]:
        """The share and the segment, by what was `seen`."""
        p = self.p
        costs = self.costs()
        share = self.share(costs)
        index, before = self.find(costs, share)
        request, first_page = self.request(index), self.first_page(index)
        length = self.length(request, share)
        passed = Int32(0)
        if p.units_per_cta_group > 1:
            passed = ptx.divide(share.begin - before, length)
        unit = passed * self.unit_step + self.first_unit
        return share, Segment(index, unit, before + passed * length + p.overhead, first_page, request)

    @cute.jit
    def costs(self) -> Costs:
        """The costs of all requests: lane l sums those of a run of them."""
        p, lane = self.p, cute.arch.thread_idx()[0] & 31
        run = (p.batch + 31) >> 5
        own, longest = Int32(0), Int32(0)
        for i in cutlass.range(0, run, unroll=4):
            cost = self.cost(lane * run + i)
            own, longest = own + cost, ptx.maximum(longest, cost)
        return Costs(run, own, self.reach(own), longest)

    def reach(self, own: Int32) -> Int32:
        """Sum of the numbers of this lane and all lanes before it."""
        lane, reach = cute.arch.thread_idx()[0] & 31, own
        for delta in range(5):
            other = ptx.shuffle_up(reach, 1 << delta)
            reach = reach + ptx.select(lane >= 1 << delta, other, Int32(0))
        return reach

    @cute.jit
    def find(self, costs: Costs, share: Share) -> tuple[Int32, Int32]:
        """The request in which a share begins, and its first position: the warp finds the run and, within it, the
        request."""
        run, reach = costs.run, costs.reach
        ended = ptx.count_ones(isa.ballot(reach <= share.begin))  # 32 for a share past the last request
        holder = ptx.minimum(ended, Int32(31))
        before = ptx.shuffle_from(reach - costs.own, holder)
        index, passed = ptx.select(run == 1, ended, holder * run), before
        for i in cutlass.range(0, ptx.select(run == 1, Int32(0), run), unroll=4):
            passed = passed + self.cost(holder * run + i)
            behind = passed <= share.begin
            index = index + ptx.flag(behind)
            before = ptx.select(behind, passed, before)
        return index, before

    def share(self, costs: Costs) -> Share:
        return self.equal_share(ptx.shuffle_from(costs.reach, Int32(31)))

    def equal_share(self, total: Int32) -> Share:
        return self.share_of(self.number, total, ptx.maximum(self.p.min_share, self.per_share(total + self.shares - 1)))

    def share_of(self, number: Int32, total: Int32, size: Int32, pitch: Int32 | int = 0) -> Share:
        """A share of a sequence of `total` positions."""
        begin = number * size
        return Share(begin, ptx.select(begin < total, ptx.minimum(begin + size, total), Int32(0)), size, pitch)

    @property
    def shares(self) -> Int32:
        """Number of shares of the CTA group."""
        return cute.arch.grid_dim()[1]

    @property
    def number(self) -> Int32:
        """Number of this CTA's share."""
        return cute.arch.block_idx()[1]

    def per_share(self, count: Int32) -> Int32:
        """`count` divided by the number of shares of the group."""
        return Divisor(self.shares, self.p.shares_multiplier, self.p.shares_shift).quotient(count)

    def lead(self, share: Share) -> Int32:
        """Positions of a segment before that of its first tile."""
        return self.p.overhead

    def length(self, request: Request, share: Share) -> Int32:
        """Positions of a segment of a request."""
        return request.tiles + self.p.overhead

    @property
    def unit_step(self) -> Int32:
        """Distance of a warp's units."""
        return cute.arch.grid_dim()[0] * self.spec.heads

    def overlaps(self, segment: Segment, share: Share) -> Boolean:
        return segment.start - self.lead(share) < share.end

    def split(self, segment: Segment, share: Share) -> KvSplit:
        """A share's tiles of a segment."""
        tiles = segment.request.tiles
        begin = ptx.maximum(share.begin - segment.start, Int32(0))
        end = ptx.minimum(share.end - segment.start, tiles)
        last = self.place_of_empty(segment, share)
        empty = isa.all_of([tiles == 0, share.begin <= last, last < share.end])
        whole = cutlass.or_(isa.all_of([begin == 0, end == tiles, tiles > 0]), empty)
        return KvSplit(begin, end, whole, cutlass.or_(begin < end, empty))

    def place_of_empty(self, segment: Segment, share: Share) -> Int32:
        """Position by which a segment without tiles belongs to a share: its last one of overhead."""
        return segment.start - 1

    def part(self, split: KvSplit) -> KvSplit:
        """This CTA's part of a share's tiles of a segment: all of them."""
        return split

    def next_start(self, segment: Segment, share: Share | None) -> Int32:
        """Position of the first tile of the next segment."""
        return segment.start + segment.request.tiles + self.p.overhead

    @cute.jit
    def next_segment(self, segment: Segment, share: Share | None = None) -> Segment:
        """The next segment in the sequence of the CTA group. Beyond `share` it is of no request, so that no length is
        read: the outputs of this one would wait for it. (Kernels on tcgen05 have no registers left for that.)"""
        start = self.next_start(segment, share)
        unit = segment.unit + self.unit_step
        following = Segment(segment.index, unit, start, segment.first_page, segment.request)
        if following.unit >= self.p.num_kv_heads * self.p.row_blocks.value:
            index = following.index + 1
            index = index if share is None else ptx.select(self.overlaps(following, share), index, self.p.batch)
            following = Segment(index, self.first_unit, start, self.first_page(index), self.request(index))
        return following

    def draw(self, share: Share) -> Int32:
        """Draw the ticket of the segment after the next one, see `tickets`; 0 where segments have none."""
        return Int32(0)

    def keep(self, ticket: Int32) -> None:
        """Store a ticket that was drawn."""


@dataclass(frozen=True)
class EvenPartition(Partition):
    """Partition that gives CTAs equally many whole segments, or cuts segments into equally many equal parts, where the
    largest share is then at most `spare` positions larger than equal shares. Each segment has the positions of the
    longest one then (`Share.pitch`). Other requests are cut as they are by `Partition`."""

    def spare(self, size: Int32) -> Int32:
        """Positions by which the largest share may exceed equal shares of `size`: two rounds of the warps of an SM's
        only CTA, or four of a smaller CTA's, take less time than a partial result, which is written, read and merged.
        """
        return Int32((2 if self.spec.ctas == 1 else 4) * self.spec.teams)

    def share(self, costs: Costs) -> Share:
        p, ctas, cta = self.p, self.shares, self.number
        total = ptx.shuffle_from(costs.reach, Int32(31))
        equal = self.equal_share(total)
        most = equal.size + self.spare(equal.size)
        longest = ptx.divide(ptx.warp_maximum(costs.longest), p.units_per_cta_group)
        segments = p.batch * p.units_per_cta_group
        of_cta = self.per_share(segments + ctas - 1)  # segments
        parts = ptx.maximum(ptx.divide(ctas, ptx.maximum(segments, Int32(1))), Int32(1))  # of a segment
        parts = ptx.select(of_cta * longest <= most, Int32(1), parts)
        part = ptx.divide(longest + parts - 1, parts)
        size = of_cta * part
        even = isa.all_of([size >= equal.size, size <= most])
        pitch = ptx.select(even, parts * part, Int32(0))
        total = ptx.select(even, segments * pitch, total)
        return self.share_of(cta, total, ptx.select(even, size, equal.size), pitch)

    @cute.jit
    def find(self, costs: Costs, share: Share) -> tuple[Int32, Int32]:
        index, before = Int32(0), Int32(0)
        if share.pitch > 0:
            length = share.pitch * self.p.units_per_cta_group
            index = ptx.divide(share.begin, length)
            before = index * length
        else:
            index, before = Partition.find(self, costs, share)
        return index, before

    def split(self, segment: Segment, share: Share) -> KvSplit:
        begin = ptx.opaque(self.number) * share.size  # computed again: no register holds it meanwhile
        return super().split(segment, share._replace(begin=begin))

    def length(self, request: Request, share: Share) -> Int32:
        return ptx.select(share.pitch > 0, share.pitch, super().length(request, share))

    def next_start(self, segment: Segment, share: Share | None) -> Int32:
        assert share is not None
        return segment.start + self.length(segment.request, share)


@dataclass(frozen=True)
class WarpShares(EvenPartition):
    """Partition of small CTAs, many of which run on an SM: while those with longer segments are alone, half of them
    keep enough bytes in flight."""

    def spare(self, size: Int32) -> Int32:
        return size >> 2


@dataclass(frozen=True)
class WholeSegments(Partition):
    """Partition where every segment is short: a CTA or a warp for each, which needs no other request's lengths, and no
    merge in global memory. The grid is [units / units of a CTA, 1, requests]."""

    @property
    def index(self) -> Int32:
        """Index of this CTA's request."""
        return cute.arch.block_idx()[2]

    def prefetch_lengths(self) -> None:
        self.prefetch_request(self.index)

    def seen(self) -> list[Int32]:
        """In flight together: ptxas waits for the length before the branch to a load of the page."""
        return [self.first_page(self.index), self.kv_len(self.index)]

    def found(self, seen: list[Int32]) -> tuple[Share, Segment]:
        """The only segment of this warp, and a share that is its own."""
        first_page, kv_len = seen
        request = self.request_of(self.index, kv_len)
        positions = request.tiles + self.p.overhead
        segment = Segment(self.index, self.first_unit, self.p.overhead, first_page, request)
        return Share(Int32(0), positions, positions), segment

    def next_segment(self, segment: Segment, share: Share | None = None) -> Segment:
        """A segment beyond the share."""
        return segment._replace(start=self.next_start(segment, share))


@dataclass(frozen=True)
class ClusterShares(EvenPartition):
    """Partition whose shares are those of clusters of CTAs: they divide a share's tiles of a segment equally, and merge
    their results in shared memory.

    Equal parts of segments have at least `min_share` tiles. Where shares are whole segments or such parts, segments
    have no positions but those of tiles, and their order alone tells the first one of a share.

    A warp reads all lengths at once: each lane those of two requests, or of none.
    """

    spec: XqaSpec

    @property
    def shares(self) -> Int32:
        return cute.arch.grid_dim()[1] // self.spec.cluster_size

    @property
    def number(self) -> Int32:
        return cute.arch.block_idx()[1] // self.spec.cluster_size

    def spare(self, size: Int32) -> Int32:
        """28 tiles for each CTA: an SM copies them in the time that a cut takes (H200, 2026-11-30)."""
        return Int32(28 * self.spec.cluster_size)

    def prefetch_lengths(self) -> None:
        self.prefetch_request(Int32(0))

    def indices(self) -> tuple[Int32, Int32]:
        """The requests whose lengths this lane reads."""
        first = (cute.arch.thread_idx()[0] & 31) * 2
        return first, first + 1

    def seen(self) -> list[Int32]:
        return [read(index) for read in (self.first_page, self.kv_len) for index in self.indices()]

    @cute.jit
    def found(self, seen: list[Int32]) -> tuple[Share, Segment]:
        p = self.p
        pages, lengths = seen[:2], seen[2:]
        tiles = [self.request_of(i, length).tiles for i, length in zip(self.indices(), lengths, strict=True)]
        costs = [
            ptx.select(i < p.batch, (n + p.overhead) * p.units_per_cta_group, Int32(0))
            for i, n in zip(self.indices(), tiles, strict=True)
        ]
        segments = p.batch * p.units_per_cta_group
        count = self.per_share(segments + self.shares - 1)  # segments of a share
        parts = ptx.maximum(ptx.divide(self.shares, ptx.maximum(segments, Int32(1))), Int32(1))  # of a segment
        longest = ptx.warp_maximum(ptx.maximum(*tiles))
        share = self.share_of_lengths(ptx.warp_sum(costs[0] + costs[1]), longest, count, parts)
        passed = ptx.divide(self.number * count, parts)  # segments before the share
        index = ptx.divide(passed, p.units_per_cta_group)
        passed, before = passed - index * p.units_per_cta_group, index * (share.pitch * p.units_per_cta_group)
        if share.pitch == 0:
            index, before = self.find_among(costs, share)
        request = self.request_of(index, self.held(lengths, index))
        length = self.length(request, share)
        if isa.all_of([share.pitch == 0, p.units_per_cta_group > 1]):
            passed = ptx.divide(share.begin - before, length)
        start = before + passed * length + self.lead(share)
        unit = passed * self.unit_step + self.first_unit
        return share, Segment(index, unit, start, self.held(pages, index), request)

    def held(self, words: list[Int32], index: Int32) -> Int32:
        """The word of a request, of those that all lanes hold."""
        even, odd = (ptx.shuffle_from(word, index >> 1) for word in words)
        return ptx.select((index & 1) == 0, even, odd)

    def find_among(self, costs: list[Int32], share: Share) -> tuple[Int32, Int32]:
        """The request in which a share begins, and its first position, by the costs of this lane's requests."""
        own = costs[0] + costs[1]
        reach = self.reach(own)
        ended = ptx.count_ones(isa.ballot(reach <= share.begin))
        before = ptx.shuffle_from(reach - own, ended)
        following = before + ptx.shuffle_from(costs[0], ended)
        behind = following <= share.begin
        return ended * 2 + ptx.flag(behind), ptx.select(behind, following, before)

    def share_of_lengths(self, total: Int32, longest: Int32, count: Int32, parts: Int32) -> Share:
        """The share of a sequence of `total` positions whose longest segment has `longest` tiles: `count` segments, or
        one of `parts` of a segment, where these are about even."""
        p = self.p
        equal = self.equal_share(total)
        # Rounded up by a multiplication: `parts` is known before the lengths.
        divisor = Divisor(parts, ptx.divide(Int32(-1), parts) + 1, Int32(0))
        part = ptx.maximum(divisor.quotient(longest + parts - 1), p.min_share)
        part = ptx.select(longest - part <= 2 * p.min_share, ptx.maximum(longest, Int32(1)), part)  # a cut takes longer
        cost = count * (ptx.minimum(part, longest) + p.overhead)
        even = cost <= equal.size + self.spare(equal.size)
        size, pitch = ptx.select(even, count * part, equal.size), ptx.select(even, parts * part, Int32(0))
        total = ptx.select(even, p.batch * p.units_per_cta_group * pitch, total)
        return self.share_of(self.number, total, size, pitch)

    def lead(self, share: Share) -> Int32:
        return ptx.select(share.pitch > 0, Int32(0), self.p.overhead)

    def place_of_empty(self, segment: Segment, share: Share) -> Int32:
        return segment.start - ptx.flag(share.pitch == 0)

    def part(self, split: KvSplit) -> KvSplit:
        size = self.spec.cluster_size
        tiles = (split.tiles + (size - 1)) // size
        begin = split.begin + cluster.rank() * tiles
        return split._replace(begin=begin, end=ptx.minimum(begin + tiles, split.end))
