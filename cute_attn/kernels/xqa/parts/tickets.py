"""Partition by tickets: where no segment is long, and there are more than CTAs or these guess their first one, a CTA
takes the next segment as soon as it has finished one. None is cut, and CTAs whose memory answers late take fewer.

Ticket t is segment t of the CTA group's sequence. The first two tickets of CTA c of C are c and c + C. The others come
from a counter in global memory, one segment early: thread 0 draws a ticket before the first copies of the next segment
(`draw`), and stores it in shared memory between the two barriers of the merge (`keep`). Every segment has the positions
of the longest one in the sequence (`Share.pitch`), and the share of a CTA is the whole sequence."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.scalars import shared_memory
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.partition import Costs, EvenPartition, KvSplit, Request, Segment, Share
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec

BEYOND = 1 << 30  # position of no tile
AT_ONCE = 4  # lengths that a lane reads together


@dataclass(frozen=True)
class TicketPartition(EvenPartition):
    """Partition that deals whole segments to CTAs as these become free, or divides them as `EvenPartition` does."""

    spec: XqaSpec

    def share(self, costs: Costs) -> Share:
        ctas, cta = self.shares, self.number
        share = super().share(costs)
        longest = ptx.divide(ptx.warp_maximum(costs.longest), self.p.units_per_cta_group)
        equal = self.per_share(ptx.shuffle_from(costs.reach, Int32(31)) + ctas - 1)
        many = [] if self.spec.prefetch else [self.segments > ctas]  # a guess needs no other reason
        dealt = isa.all_of([*many, longest <= self.most(equal)])
        total = self.segments * longest
        return Share(
            ptx.select(dealt, cta * longest, share.begin),
            ptx.select(dealt, total, share.end),
            ptx.select(dealt, Int32(BEYOND), share.size),
            ptx.select(dealt, longest, share.pitch),
        )

    def most(self, equal: Int32) -> Int32:
        """Positions of the longest segment that is dealt out, where an equal share has `equal`: up to `dealt` the parts
        of a segment cost more than a wait for the CTA that takes one last, up to twice as many where half of an equal
        share is as long."""
        longer = ptx.minimum(ptx.maximum(equal >> 1, self.p.dealt), self.p.dealt * 2)
        return ptx.maximum(equal >> 2, longer)

    @property
    def segments(self) -> Int32:
        """Segments of the CTA group."""
        return self.p.batch * self.p.units_per_cta_group

    @property
    def draws(self) -> Boolean:
        """Whether there are more than two tickets for each CTA."""
        return self.segments > 2 * cute.arch.grid_dim()[1]

    def dealt(self, share: Share) -> Boolean:
        """Whether segments are dealt out."""
        return share.size == BEYOND

    def split(self, segment: Segment, share: Share) -> KvSplit:
        size = ptx.select(self.dealt(share), Int32(0), share.size)  # no segment begins before a share of all
        return super().split(segment, share._replace(size=size))

    @cute.jit
    def next_segment(self, segment: Segment, share: Share) -> Segment:
        following = segment
        if self.dealt(share):
            following = self.segment_of(self.next_ticket(segment, share), share)
        else:
            following = EvenPartition.next_segment(self, segment, share)
        return following

    @cute.jit
    def next_ticket(self, segment: Segment, share: Share) -> Int32:
        """The ticket after that of a segment; without more than two for each CTA, one of no segment is the third."""
        cta, ctas = ptx.opaque(cute.arch.block_idx()[1]), cute.arch.grid_dim()[1]
        first = segment.start == cta * share.pitch + self.p.overhead
        ticket = cta + ptx.select(first, ctas, 2 * ctas)
        if isa.all_of([ticket >= 2 * ctas, self.draws]):
            ticket = ptx.ld_shared_b32(self.place)
        return ticket

    @property
    def place(self) -> Int32:
        """Address of the next ticket: the word in which other partitions count arrivals at a segment that was cut."""
        return shared_memory() + XqaMemory(self.spec).ticket

    def segment_of(self, ticket: Int32, share: Share, seen: list[Int32] | None = None) -> Segment:
        """The segment of a ticket, whose place and length may have been `seen`."""
        index = ptx.divide(ticket, self.p.units_per_cta_group)
        unit = (ticket - index * self.p.units_per_cta_group) * self.unit_step + self.first_unit
        start = ticket * share.pitch + self.p.overhead
        first_page, kv_len = seen or (self.first_page(index), self.kv_len(index))
        return Segment(index, unit, start, first_page, self.request_of(index, kv_len))

    @cute.jit
    def draw(self, share: Share) -> Int32:
        """Draw a ticket, by thread 0. The CTA that draws the last one sets the counter to 0 for the next launch."""
        ticket, ctas = Int32(0), cute.arch.grid_dim()[1]
        if isa.all_of([cute.arch.thread_idx()[0] == 0, self.dealt(share), self.draws]):
            counter = self.p.counters + Int64(cute.arch.block_idx()[0]) * Int64(4)
            drawn = tma.atomic_increment(counter)
            if drawn == self.segments - ctas - 1:
                ptx.st_global_b32(counter, 0, Int32(0))
            ticket = drawn + 2 * ctas
        return ticket

    @cute.jit
    def keep(self, ticket: Int32) -> None:
        """Store a ticket that was drawn, between two barriers of the CTA."""
        if ticket > 0:
            ptx.st_shared_b32(self.place, 0, ticket)


@dataclass(frozen=True)
class GuessPartition(TicketPartition):
    """Partition whose CTAs guess their first segment before the preceding kernel has ended: that of their first ticket,
    which they have if all segments are short. Its place and length tell where the first tiles are, and these are copied
    while the lengths of all requests are read."""

    def seen(self) -> list[Int32]:
        index = ptx.divide(self.number, self.p.units_per_cta_group)
        return [self.first_page(index), self.kv_len(index)]

    def found(self, seen: list[Int32]) -> tuple[Share, Segment]:
        """The share and the segment if all are short."""
        pitch = self.p.dealt
        share = Share(self.number * pitch, self.segments * pitch, Int32(BEYOND), pitch)
        return share, self.segment_of(self.number, share, seen)

    def first_segment(self) -> tuple[Share, Segment]:
        return super().found([])

    def may_be_right(self, segment: Segment) -> Boolean:
        """Whether a guess may be right, as far as the guessed segment tells. Queries are not read early."""
        return isa.all_of([self.p.q_indptr == Int64(0), self.p.pages > 0, self.is_short(segment.request)])

    def is_short(self, request: Request) -> Boolean:
        """Whether a segment is dealt out whatever the others are."""
        return request.tiles + self.p.overhead <= self.p.dealt

    def lengths(self) -> list[Int32]:
        """Lengths of this lane's first requests, read at once."""
        return [self.kv_len((cute.arch.thread_idx()[0] & 31) + 32 * i) for i in range(AT_ONCE)]

    @cute.jit
    def are_short(self, lengths: list[Int32]) -> Boolean:
        """Whether all segments are short. `lengths`: the first ones."""
        lane, short = cute.arch.thread_idx()[0] & 31, Boolean(True)
        for i in cutlass.range_constexpr(AT_ONCE):
            short = isa.all_of([short, self.is_short(self.request_of(lane + 32 * i, lengths[i]))])
        for index in cutlass.range(lane + 32 * AT_ONCE, self.p.batch, 32, unroll=4):
            short = isa.all_of([short, self.is_short(self.request(index))])
        return isa.ballot(cutlass.not_(short)) == Int32(0)
