"""Online softmax of rows whose scores and outputs the warps of a row group share.

Every warp has the same anchors: they follow from maxima that all warps tell each other. Sums are per thread until the
end of a segment.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.softmax import Running, RunningSoftmax, add, tree
from cute_attn.kernels.mla.parts.exchange import Exchange
from cute_attn.kernels.mla.parts.place import Place
from cute_attn.kernels.xqa.parts.merge import Merge


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
            first = start + place.first_score_column()
            for slot in layout.slots:
                for i, column in layout.places(slot):
                    visible = first + column < self.stops[slot]
                    kept[i] = ptx.select(visible, kept[i], Float32(ptx.NEG_INF))
        return kept
