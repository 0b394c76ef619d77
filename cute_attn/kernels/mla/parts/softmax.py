"""Online softmax of rows whose scores and outputs the warps of a row group share.

Every warp has the same anchors: they follow from maxima that all warps tell each other. Sums are per thread until the
end of a segment.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout, RowNumbers
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.softmax import Running, RunningSoftmax, add, tree
from cute_attn.kernels.mla.parts.products import Place
from cute_attn.kernels.mla.smem import MlaMemory
from cute_attn.kernels.xqa.parts.merge import Merge


@dataclass(frozen=True)
class Exchange:
    """Shared memory in which the warps of a row group tell each other numbers per row, P, and their outputs."""

    memory: MlaMemory
    place: Place
    base: Int32  # of shared memory

    @property
    def numbers(self) -> RowNumbers:
        """One number per row from each slice."""
        return RowNumbers(self.base + Int32(self.memory.columns), self.memory.rows, self.place)

    def put_column(self, values: list[Float32]) -> None:
        """Write a number per row slot to the column of this warp's slice."""
        self.numbers.put(self.place.slice, values)

    def columns(self, slot: int) -> list[Float32]:
        """Read what all slices have put for a row slot."""
        return self.numbers.of_row(self.place.row(slot), self.memory.spec.slices)

    def put_p(self, p: list[Float32]) -> None:
        """Write this thread's part of P in 16 bits."""
        place, layout = self.place, self.place.scores
        column = place.slice * place.slice_cols + MmaFragmentLayout.lane_col(place.lane)
        for slot in layout.slots:
            address = self.base + Int32(self.memory.p) + place.row(slot) * self.memory.p_pitch + column * 2
            for i, first in layout.pairs(slot):
                ptx.st_shared_b32(address, first * 2, ptx.pack_16(self.memory.spec.dtype, p[i], p[i + 1]))

    def put_outputs(self, merge: Merge, out: list[Float32]) -> None:
        """Write this thread's outputs where the merge reads them."""
        place, layout = self.place, self.place.outputs
        first = place.slice * place.slice_dim + MmaFragmentLayout.lane_col(place.lane)
        for slot in layout.slots:
            row = place.row(slot)
            address = self.base + Int32(self.memory.outputs) + row * (self.memory.tile_dim * 4)
            for i, column in layout.pairs(slot):
                dim = merge.swizzled_dim(first + column, row)
                ptx.st_shared_v2_f32(address + dim * 4, 0, out[i : i + 2])

    @cute.jit
    def put_stats(self, maxima: list[Float32], totals: list[Float32]) -> None:
        """Write maximum and sum of every row where the merge reads them."""
        if cutlass.and_(self.place.quad_lane == 0, self.place.slice == 0):
            for slot in cutlass.range_constexpr(len(maxima)):
                at = self.base + Int32(self.memory.stats) + self.place.row(slot) * 8
                ptx.st_shared_v2_f32(at, 0, [maxima[slot], totals[slot]])


@dataclass(frozen=True)
class SharedSoftmax:
    place: Place
    exchange: Exchange

    @property
    def rows(self) -> RunningSoftmax:
        """The softmax of scores that are scaled already: in log2 units."""
        layout = self.place.scores
        return RunningSoftmax(layout, [Float32(1.0) for _ in layout.slots], output=self.place.outputs)

    def add_scores(self, running: Running, s: list[Float32]) -> Running:
        """Turn scores into P in shared memory, and rescale outputs and sums where anchors move."""
        rows, exchange = self.rows, self.exchange
        exchange.put_column(rows.row_max(s))
        self.place.sync_group()
        running = rows.raise_anchors(running, [tree(ptx.fmax, exchange.columns(slot)) for slot in rows.slots])
        p = rows.exponentials(s, running.shift, may_be_empty=True)
        exchange.put_p(p)
        self.place.sync_group()
        return running._replace(total=rows.sums(p, running.total))

    def publish(self, merge: Merge, running: Running) -> None:
        """Write outputs, maxima and sums where the merge reads them. All warps are done with the tiles."""
        exchange, layout = self.exchange, self.place.scores
        exchange.put_column([layout.reduce(add, x) for x in running.total])
        exchange.put_outputs(merge, running.out)
        self.place.sync_group()
        totals = [tree(add, exchange.columns(slot)) for slot in layout.slots]
        exchange.put_stats([Float32(0.0) - x for x in running.shift], totals)


@dataclass(frozen=True)
class CausalMask:
    """Keys that the rows of a warp see: token r of a request those before kv_len - qo_len + 1 + r + `right`."""

    place: Any  # `Place` or one like it
    stops: list[Int32]  # per row slot, behind its last key
    common: Int32  # all rows see the keys before it

    @classmethod
    def of(cls, place: Any, rows: PackedRows, kv_len: Int32, diagonal: Int32) -> "CausalMask":
        """Return the mask of a segment's rows. `diagonal`: the keys that token 0 sees."""
        stops = [ptx.minimum(diagonal + rows.token(place.row(slot)), kv_len) for slot in place.scores.slots]
        return cls(place, stops, ptx.minimum(diagonal, kv_len))

    @cute.jit
    def apply(self, s: list[Float32], start: Int32) -> list[Float32]:
        """Set hidden scores of the tile that starts at token `start` to -inf."""
        place, layout = self.place, self.place.scores
        kept = list(s)
        if start + place.spec.cols > self.common:
            first = start + place.first_col()
            for slot in layout.slots:
                for i, column in layout.places(slot):
                    visible = first + column < self.stops[slot]
                    kept[i] = ptx.select(visible, kept[i], Float32(ptx.NEG_INF))
        return kept
