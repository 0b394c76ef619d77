"""Partition by tickets: where there are more segments than CTAs and none of them is long, each CTA takes the next
segment as soon as it has finished one, so that CTAs whose memory answers late take fewer."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.scalars import shared_memory
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.even import EvenPartition
from cute_attn.kernels.xqa.parts.partition import BEYOND, Costs, KvSplit, Segment, Share
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec


import os
DEAL_SHIFT, DEAL_SHORT = int(os.environ.get('DEAL_SHIFT','2')), int(os.environ.get('DEAL_SHORT','36'))

@dataclass(frozen=True)
class TicketPartition(EvenPartition):
    """Partition that deals whole segments to CTAs as they become free, or cuts as `EvenPartition` does.

    Ticket t is segment t of the CTA group's sequence. The first two tickets of CTA c of C are c and c + C. The others
    come from a counter in global memory, one segment early: thread 0 draws a ticket when the copies of the next segment
    have been issued (`draw`), and stores it in shared memory between the two barriers of the merge (`keep`). Segments
    that are dealt out have equal places in the sequence (`Share.pitch`), and a share is the whole sequence.
    """

    spec: XqaSpec

    def share(self, costs: Costs) -> Share:
        p, ctas, cta = self.p, cute.arch.grid_dim()[1], cute.arch.block_idx()[1]
        share = super().share(costs)
        longest = ptx.divide(ptx.warp_maximum(costs.longest), p.units_per_cta_group)
        equal = self.per_cta(isa.shuffle(costs.reach, Int32(31)) + ctas - 1)
        dealt = isa.all_of([self.segments > ctas, longest <= self.most(equal)])
        total = self.segments * longest
        return Share(
            ptx.select(dealt, cta * longest, share.begin),
            ptx.select(dealt, total, share.end),
            ptx.select(dealt, Int32(BEYOND), share.size),
            ptx.select(dealt, longest, share.pitch),
        )

    def most(self, equal: Int32) -> Int32:
        """Positions of the longest segment that is dealt out, where equal shares have `equal`."""
        return ptx.maximum(equal >> DEAL_SHIFT, Int32(DEAL_SHORT))

    @property
    def segments(self) -> Int32:
        """Segments of the CTA group."""
        return self.p.batch * self.p.units_per_cta_group

    @property
    def draws(self) -> Boolean:
        """Whether there are more tickets than two for each CTA."""
        return self.segments > 2 * cute.arch.grid_dim()[1]

    def dealt(self, share: Share) -> Boolean:
        """Whether segments are dealt out."""
        return share.size == BEYOND

    def split(self, segment: Segment, share: Share) -> KvSplit:
        cta = ptx.opaque(cute.arch.block_idx()[1])  # computed again: no register holds it meanwhile
        begin = ptx.select(self.dealt(share), Int32(0), cta * share.size)
        return super(EvenPartition, self).split(segment, share._replace(begin=begin))

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
        """The ticket after that of a segment."""
        cta, ctas = ptx.opaque(cute.arch.block_idx()[1]), cute.arch.grid_dim()[1]
        first = segment.start == cta * share.pitch + self.p.overhead
        ticket = cta + ptx.select(first, ctas, 2 * ctas)
        if isa.all_of([segment.start != cta * share.pitch + self.p.overhead, self.draws]):
            ticket = ptx.ld_shared_b32(self.place)
        return ticket

    @property
    def place(self) -> Int32:
        """Address of the next ticket, where a CTA that has cut a segment counts arrivals."""
        return shared_memory() + XqaMemory.of(self.spec).ticket

    def segment_of(self, ticket: Int32, share: Share) -> Segment:
        index = ptx.divide(ticket, self.p.units_per_cta_group)
        unit = (ticket - index * self.p.units_per_cta_group) * self.unit_step + self.first_unit
        start = ticket * share.pitch + self.p.overhead
        return Segment(index, unit, start, self.first_page(index), self.request(index))

    @cute.jit
    def draw(self, share: Share) -> Int32:
        """Draw a ticket, by thread 0. The CTA that draws the last one resets the counter."""
        ticket, ctas = Int32(0), cute.arch.grid_dim()[1]
        if isa.all_of([cute.arch.thread_idx()[0] == 0, self.dealt(share), self.draws]):
            counter = self.p.counters + Int64(cute.arch.block_idx()[0]) * Int64(4)
            drawn = isa.draw(counter)
            if drawn == self.segments - ctas - 1:
                ptx.st_global_b32(counter, Int32(0))
            ticket = drawn + 2 * ctas
        return ticket

    @cute.jit
    def keep(self, ticket: Int32) -> None:
        """Store a ticket that was drawn, between two barriers of the CTA."""
        if ticket > 0:
            ptx.st_shared_b32(self.place, 0, ticket)
