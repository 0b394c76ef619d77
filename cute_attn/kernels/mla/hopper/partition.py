"""Partition of requests that are equally long: equal shares would cut each of them somewhere else."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.xqa.parts.partition import Partition, Share

SWITCH = 4  # tiles in whose time a CTA ends a part of a segment and begins another


class EvenPartition(Partition):
    """Partition that cuts segments of equally many tiles into equally many whole parts, or gives CTAs as many whole
    ones, where the largest share then grows by at most `SWITCH` tiles. Others are cut as they are by `Partition`."""

    @cute.jit
    def share(self, total: Int32) -> Share:
        p, lane = self.p, cute.arch.thread_idx()[0] & 31
        run, longest = (p.batch + 31) >> 5, Int32(0)
        for i in cutlass.range(0, run, unroll=1):
            longest = ptx.maximum(longest, self.cost(lane * run + i))
        longest = ptx.warp_maximum(longest)
        share = super().share(total)
        if cutlass.and_(p.batch > 1, longest * p.batch == total):
            size = self.even(ptx.divide(longest, p.units_per_cta_group), share.size)
            if size <= share.size + SWITCH:
                begin = cute.arch.block_idx()[1] * size
                share = Share(begin, ptx.select(begin < total, ptx.minimum(begin + size, total), Int32(0)), size)
        return share

    def even(self, segment: Int32, size: Int32) -> Int32:
        """Return the next larger share of which a segment has a whole number, or which has a whole number of them."""
        parts = ptx.maximum(ptx.divide(segment, size), Int32(1))
        part = ptx.divide(segment + parts - 1, parts)
        whole = ptx.divide(size + segment - 1, segment) * segment
        return ptx.select(segment > size, part, whole)
