"""Merge of segments that several CTAs share, through partial results in global memory.

A CTA that has a part of a segment stores its state per row: maximum, sum, and outputs that are not normalised. Of every
`GROUP` CTAs the last to arrive merges their states; where there are more, it stores the result in the place of the
first, and the last group to arrive merges those. The order of additions depends on lengths alone, not on timing.

A warp has several rows at a time, and reads their states from all CTAs in turn: shared memory is not needed, so that
tiles of the next segment are copied meanwhile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import warp_index
from cute_attn.kernels.mla.spec import LATENT, HopperMlaSpec
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.merge import PartialResults, SoftmaxState, rescale_factor

GROUP = 12  # about the root of the number of SMs
# Rows of a warp, and states of each, whose loads are in flight together.
WARP_ROWS = 2
WARP_STATES = 3
VECTOR = 4  # floats of a load
VECTORS = LATENT // (32 * VECTOR)  # of a row, per lane


class Parts(NamedTuple):
    """CTAs whose states are merged: `count` of those that have a part of a segment, every `step`-th from `begin` on."""

    begin: Int32
    step: Int32
    count: Int32


@dataclass(frozen=True)
class SegmentMerge(PartialResults):
    """Merge of one segment by all threads of the MMA warpgroups. `first`: the first share with a part of the segment;
    `shares`: their number."""

    spec: HopperMlaSpec
    finish: FinalEpilogue
    rows: PackedRows
    first: Int32
    shares: Int32
    ticket: Int32  # address of a word of shared memory
    barrier: int  # named barrier of the threads

    # --- places in global memory -------------------------------------------------------------------------------------

    def cta(self, index: Int32) -> Int32:
        """Linear index of the CTA that has part `index` of the segment."""
        return self.cta_index(self.first + index)

    @property
    def ctas(self) -> Int32:
        return cute.arch.grid_dim()[0] * cute.arch.grid_dim()[1]

    @property
    def own(self) -> Int32:
        """Index of this CTA's part."""
        return cute.arch.block_idx()[1] - self.first

    def state(self, index: Int32, row: Int32) -> tuple[Int64, Int64]:
        """Addresses of (maximum, sum) and of the outputs of a row, of part `index`. A CTA has room for two: for a
        segment that it begins and another CTA ends, and for one that another CTA began."""
        return self.partial_address(self.cta(index) * 2 + ptx.flag(index == 0), row)

    def counter(self, index: Int32) -> Int64:
        """Address of a counter: those of segments, by their first CTA, before those of groups, by their last one."""
        return self.p.counters + Int64(index) * Int64(4)

    # --- merge -------------------------------------------------------------------------------------------------------

    @cute.jit
    def merge(self) -> None:
        """Count this CTA, whose state is stored, and merge where it is the last."""
        begin = self.own // GROUP * GROUP
        size = ptx.minimum(Int32(GROUP), self.shares - begin)
        parts, last = Parts(begin, Int32(1), size), self.shares <= GROUP
        merges = self.is_last(self.counter(self.ctas + self.cta(begin + size - 1)), size)
        while merges:
            self.merge_rows(parts, last)
            merges = Boolean(False)
            if cutlass.not_(last):
                groups = (self.shares + (GROUP - 1)) // GROUP
                parts, last = Parts(Int32(0), Int32(GROUP), groups), Boolean(True)
                merges = self.is_last(self.counter(self.cta(Int32(0))), groups)

    @cute.jit
    def is_last(self, counter: Int64, count: Int32) -> Boolean:
        """Count this CTA; tell whether it is the last of `count`, and then reset the counter for the next launch."""
        self.sync()
        if cute.arch.thread_idx()[0] == 0:
            arrived = isa.add_arrival(counter)
            if arrived == count - 1:
                ptx.st_global_b32(counter, 0, Int32(0))
            ptx.st_shared_b32(self.ticket, 0, arrived)
        self.sync()
        return ptx.ld_shared_b32(self.ticket) == count - 1

    def sync(self) -> None:
        tma.named_sync(Int32(self.barrier), self.spec.mma_threads)

    @cute.jit
    def merge_rows(self, parts: Parts, last: Boolean) -> None:
        warps = self.spec.mma_threads // 32
        count = ptx.minimum(self.rows.count - self.rows.first, Int32(self.spec.rows))
        for row in cutlass.range(warp_index(), count, warps * WARP_ROWS, unroll=1):
            rows = [row + warps * i for i in range(WARP_ROWS)]
            states = [SoftmaxState.empty(VECTORS * VECTOR) for _ in rows]
            for i in cutlass.range(0, parts.count, WARP_STATES, unroll=1):
                loaded = [[self.load(parts, i + j, row) for row in rows] for j in range(WARP_STATES)]
                for more in loaded:
                    states = [self.merged(old, new) for old, new in zip(states, more, strict=True)]
            if last:
                self.store(rows, states)
            else:
                self.store_states(parts.begin, rows, states)

    @property
    def lane(self) -> Int32:
        return cute.arch.thread_idx()[0] & 31

    def load(self, parts: Parts, i: Int32, row: Int32) -> SoftmaxState:
        """Load a row's state from the `i`-th of the parts; an empty one behind the last."""
        stats, outputs = self.state(parts.begin + i * parts.step, row)
        exists = isa.all_of([i < parts.count, self.rows.exists(row)])
        maximum, total = isa.ld_l2_if(exists, stats, 2)
        maximum = ptx.select(exists, maximum, Float32(ptx.NEG_INF))
        lane = outputs + Int64(self.lane * (VECTOR * 4))
        out = [x for i in range(VECTORS) for x in isa.ld_l2_if(exists, lane + Int64(i * 32 * VECTOR * 4), VECTOR)]
        return SoftmaxState(maximum, total, out)

    def merged(self, a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
        maximum = ptx.fmax(a.maximum, b.maximum)
        one, other = rescale_factor(a.maximum, maximum), rescale_factor(b.maximum, maximum)
        out = [ptx.fma(x, one, y * other) for x, y in zip(a.values, b.values, strict=True)]
        return SoftmaxState(maximum, ptx.fma(a.total, one, b.total * other), out)

    @cute.jit
    def store(self, rows: list[Int32], states: list[SoftmaxState]) -> None:
        """Store final outputs and lse."""
        p = self.p
        for row, state in zip(rows, states, strict=True):
            if self.rows.exists(row):
                factor, lse = self.finish.row(state.maximum, state.total, self.rows.head(row))
                place = self.rows.address(p.o, row, p.o_stride_n, p.o_stride_h) + Int64(self.lane * (VECTOR * 2))
                pairs = ptx.pack_pairs(self.spec.out_dtype, [x * factor for x in state.values])
                for i in cutlass.range_constexpr(VECTORS):
                    ptx.st_global_v2(place, i * 32 * VECTOR * 2, pairs[2 * i : 2 * i + 2])
                if cutlass.and_(self.lane == 0, p.lse != Int64(0)):
                    ptx.st_global_f32(self.rows.lse_address(p.lse, row, p.group.value), 0, lse)

    @cute.jit
    def store_states(self, index: Int32, rows: list[Int32], states: list[SoftmaxState]) -> None:
        """Store merged states in the place of that of part `index`, which all lanes have read."""
        ptx.sync_warp()
        for row, state in zip(rows, states, strict=True):
            if self.rows.exists(row):
                stats, outputs = self.state(index, row)
                lane = outputs + Int64(self.lane * (VECTOR * 4))
                for i in cutlass.range_constexpr(VECTORS):
                    ptx.st_global_v4_f32(lane, i * 32 * VECTOR * 4, state.values[VECTOR * i : VECTOR * (i + 1)])
                if self.lane == 0:
                    ptx.st_global_v2_f32(stats, 0, [state.maximum, state.total])
