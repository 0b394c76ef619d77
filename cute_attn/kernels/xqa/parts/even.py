"""Partition into whole segments, or equal parts of them, where equal shares would cut each one somewhere else."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.partition import Costs, KvSplit, Partition, Request, Segment, Share


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
        p, ctas, cta = self.p, cute.arch.grid_dim()[1], cute.arch.block_idx()[1]
        total = ptx.shuffle_from(costs.reach, Int32(31))
        equal = self.equal_share(total)
        most = equal.size + self.spare(equal.size)
        longest = ptx.divide(ptx.warp_maximum(costs.longest), p.units_per_cta_group)
        segments = p.batch * p.units_per_cta_group
        of_cta = self.per_cta(segments + ctas - 1)  # segments
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
        begin = ptx.opaque(cute.arch.block_idx()[1]) * share.size  # computed again: no register holds it meanwhile
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
