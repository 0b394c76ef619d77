"""Producer warp of one of several CTAs of an SM, of which each issues on another quarter of it."""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.producer import Producer


class SpreadProducer(Producer):
    """Producer in warp w of the producer warpgroup, in the w-th CTA of its SM: warp w issues on quarter w mod 4. Which
    CTAs share an SM is a guess that costs speed alone: those of the first SMs, then their neighbours on them.
    """

    def runs(self, thread: Int32) -> Boolean:
        return cute.arch.make_warp_uniform(thread >> 5) == self.warp()

    def thread(self) -> Int32:
        return cute.arch.thread_idx()[0] & 31

    def warp(self) -> Int32:
        """Returns the index of this CTA on its SM."""
        per_sm, block, ctas = self.spec.tile.per_sm, cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        index = Int32(0)
        for others in range(1, per_sm):
            index = index + ptx.select(block * per_sm >= ctas * others, Int32(1), Int32(0))
        return index
