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
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.row_exchange import RowExchange
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.softmax import Running, RunningSoftmax, add, tree
from cute_attn.kernels.mla.parts.products import Place
from cute_attn.kernels.xqa.parts.merge import Merge


class Exchange(RowExchange):
    """Exchange of the warps of a row group, and where they leave their outputs for the merge."""

    def put_outputs(self, merge: Merge, out: list[Float32]) -> None:
        """Write this thread's outputs where the merge reads them."""
        place, layout = self.lanes, self.lanes.outputs
        first = place.warp_col * place.slice_dim + MmaFragmentLayout.lane_col(place.lane)
        for slot in layout.slots:
            row = place.row(slot)
            address = self.base + Int32(self.memory.outputs) + row * (self.memory.tile_dim * 4)
            for i, column in layout.pairs(slot):
                dim = merge.swizzled_dim(first + column, row)
                ptx.st_shared_v2_f32(address + dim * 4, 0, out[i : i + 2])

    @cute.jit
    def put_stats(self, maxima: list[Float32], totals: list[Float32]) -> None:
        """Write maximum and sum of every row where the merge reads them."""
        if cutlass.and_(self.lanes.quad_lane == 0, self.lanes.warp_col == 0):
            for slot in cutlass.range_constexpr(len(maxima)):
                at = self.base + Int32(self.memory.stats) + self.lanes.row(slot) * 8
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
        rows, exchange, place = self.rows, self.exchange, self.place
        exchange.put_column(rows.row_max(s))
        place.sync_group()
        maxima = [tree(ptx.fmax, exchange.columns(place.row(slot))) for slot in rows.slots]
        running = rows.raise_anchors(running, maxima)
        p = rows.exponentials(s, running.shift, may_be_empty=True)
        exchange.put_p(p, place.spec.dtype)
        place.sync_group()
        return running._replace(total=rows.sums(p, running.total))

    def publish(self, merge: Merge, running: Running) -> None:
        """Write outputs, maxima and sums where the merge reads them. All warps are done with the tiles."""
        exchange, layout = self.exchange, self.place.scores
        exchange.put_column([layout.reduce(add, x) for x in running.total])
        exchange.put_outputs(merge, running.out)
        self.place.sync_group()
        totals = [tree(add, exchange.columns(self.place.row(slot))) for slot in layout.slots]
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
