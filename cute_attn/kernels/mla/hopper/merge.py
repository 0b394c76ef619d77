"""Merge of segments that several CTAs share: as that of XQA, but a warp has several rows at a time, and reads their
states from all CTAs in turn. States come from registers: shared memory is not needed, so that tiles of the next segment
are copied meanwhile.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import warp_index
from cute_attn.kernels.mla.spec import LATENT
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.merge import GROUP_BITS, Parts, SoftmaxState, StateMerge, rescale_factor

MOST_TOGETHER = 20  # partials that are not divided into groups: fewer than XQA's, which have fewer rows
# Rows of a warp, and states of each, whose loads are in flight together.
WARP_ROWS = 2
WARP_STATES = 3
VECTOR = 4  # floats of a load
VECTORS = LATENT // (32 * VECTOR)  # of a row, per lane


@dataclass(frozen=True)
class SegmentMerge(StateMerge):
    """Merge of one segment by all threads of the MMA warpgroups."""

    @property
    def lane(self) -> Int32:
        return cute.arch.thread_idx()[0] & 31

    def groups(self, count: Int32) -> Int32:
        return ptx.select(count > MOST_TOGETHER, count >> GROUP_BITS, Int32(1))

    @cute.jit
    def merge_partials(self, rows: PackedRows, parts: Parts, more: Boolean) -> None:
        warps = self.threads // 32
        count = ptx.minimum(rows.count - rows.first, Int32(self.spec.rows))
        group = parts._replace(bits=parts.bits + GROUP_BITS)
        for row in cutlass.range(warp_index(), count, warps * WARP_ROWS, unroll=1):
            of_warp = [row + warps * i for i in range(WARP_ROWS)]
            states = [SoftmaxState.empty(VECTORS * VECTOR) for _ in of_warp]
            for i in cutlass.range(0, parts.count, WARP_STATES, unroll=1):
                loaded = [[self.load(parts, i + j, rows, row) for row in of_warp] for j in range(WARP_STATES)]
                for new in loaded:
                    states = [self.joined(*both) for both in zip(states, new, strict=True)]
            for row, state in zip(of_warp, states, strict=True):
                if rows.exists(row):
                    if more:
                        self.store_state(self.partial_of_part(group, Int32(0)), row, state)
                    else:
                        self.store_row(rows, row, state)

    def load(self, parts: Parts, i: Int32, rows: PackedRows, row: Int32) -> SoftmaxState:
        """Load a row's state from the `i`-th of the parts; an empty one behind the last."""
        stats, outputs = self.partial_address(self.partial_of_part(parts, i), row)
        exists = isa.all_of([i < parts.count, rows.exists(row)])
        maximum, total = isa.ld_l2_if(exists, stats, 2)
        maximum = ptx.select(exists, maximum, Float32(ptx.NEG_INF))
        lane = outputs + Int64(self.lane * (VECTOR * 4))
        out = [x for i in range(VECTORS) for x in isa.ld_l2_if(exists, lane + Int64(i * 32 * VECTOR * 4), VECTOR)]
        return SoftmaxState(maximum, total, out)

    def joined(self, a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
        maximum = ptx.fmax(a.maximum, b.maximum)
        one, other = rescale_factor(a.maximum, maximum), rescale_factor(b.maximum, maximum)
        out = [ptx.fma(x, one, y * other) for x, y in zip(a.values, b.values, strict=True)]
        return SoftmaxState(maximum, ptx.fma(a.total, one, b.total * other), out)

    @cute.jit
    def store_row(self, rows: PackedRows, row: Int32, state: SoftmaxState) -> None:
        """Store final outputs and lse of a row."""
        p = self.p
        factor, lse = self.finish.row(state.maximum, state.total, rows.head(row))
        place = rows.address(p.o, row, p.o_stride_n, p.o_stride_h) + Int64(self.lane * (VECTOR * 2))
        pairs = ptx.pack_pairs(self.spec.out_dtype, [x * factor for x in state.values])
        for i in cutlass.range_constexpr(VECTORS):
            ptx.st_global_v2(place, i * 32 * VECTOR * 2, pairs[2 * i : 2 * i + 2])
        if cutlass.and_(self.lane == 0, p.lse != Int64(0)):
            ptx.st_global_f32(rows.lse_address(p.lse, row, p.group.value), 0, lse)

    @cute.jit
    def store_state(self, partial: Int32, row: Int32, state: SoftmaxState) -> None:
        """Store the merged state of a row."""
        stats, outputs = self.partial_address(partial, row)
        lane = outputs + Int64(self.lane * (VECTOR * 4))
        for i in cutlass.range_constexpr(VECTORS):
            ptx.st_global_v4_f32(lane, i * 32 * VECTOR * 4, state.values[VECTOR * i : VECTOR * (i + 1)])
        if self.lane == 0:
            ptx.st_global_v2_f32(stats, 0, [state.maximum, state.total])
