"""What the spec of an attention kernel composes for a work item: its mask and the modifications of its scores."""

from collections.abc import Callable
from typing import Any

from cute_attn.kernels.blocks.key_ranges import RangeMask
from cute_attn.kernels.blocks.masks import BandMask, PackedMask, StopMask
from cute_attn.kernels.blocks.multi_item import KeyBounds, MultiItemMask
from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.blocks.scores import Alibi, RowScales, Scale, Scores, SoftCap


class AttentionProgram(GridProgram):
    """Attention kernel. `tile`: its products, and how scores lie in registers. Work items tell their `band`, their
    `rows` and where their mask bits are.
    """

    spec: Any
    tile: Any

    def mask(self, p: Any, work: Any, lanes: Any) -> Any:
        band, rows, layout = work.band(p), work.rows(p), self.tile.scores_layout
        if self.spec.mask == "packed":
            return PackedMask(band, layout, rows, lanes, work.mask(p), p.mask + p.mask_bytes, work.kv_len)
        if self.spec.mask == "multi_item":
            return MultiItemMask(band, layout, rows, lanes, KeyBounds(p.mask, rows))
        if self.spec.mask == "ranges":
            return RangeMask(band, layout, rows, lanes, p.mask, p.range_left, rows.last_token(self.spec.tile.rows))
        kind = BandMask if self.spec.mask == "band" else StopMask
        return kind(band, layout, rows, lanes)

    def scores(self, p: Any, work: Any, lanes: Any, scale: Any) -> Scores:
        makers: dict[str, Callable[[], Any]] = {
            "scale": lambda: self.scale_step(p, work, lanes, scale),
            "alibi": lambda: self.alibi_step(p, work, lanes),
            "soft_cap": lambda: SoftCap(p.soft_cap),
        }
        return Scores([makers[name]() for name in self.spec.scores])

    def scale_step(self, p: Any, work: Any, lanes: Any, scale: Any) -> Scale | RowScales:
        return Scale(scale)

    def alibi_step(self, p: Any, work: Any, lanes: Any) -> Any:
        return Alibi(self.tile.scores_layout, work.rows(p), lanes, p.num_qo_heads)
