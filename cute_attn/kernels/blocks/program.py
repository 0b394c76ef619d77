"""Base of all kernels: how they are traced and launched."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks.masks import BandMask, KeyBounds, MultiItemMask, PackedMask, RangeMask, StopMask
from cute_attn.kernels.blocks.scalars import zeros
from cute_attn.kernels.blocks.scores import Alibi, RowScales, Scale, Scores, SoftCap


class GridProgram:
    """Kernel of one spec. A subclass has `kernel`, its parameters and its block, and what is not as by default."""

    params: Any
    kernel: Any
    block: tuple[int, int, int]
    smem_bytes = 0
    cluster = (1, 1, 1)
    min_ctas = 1  # per SM, that ptxas leaves registers for; 0: as it likes

    def compile_args(self) -> tuple[Any, ...]:
        return (zeros(self.params), Int32(1), Int32(1), Int32(1))

    def before_params(self, params: Any) -> list[Any]:
        """Returns arguments of the kernel before its parameters."""
        return []

    @cute.jit
    def __call__(self, params: Any, grid_x: Int32, grid_y: Int32, grid_z: Int32) -> None:
        self.kernel(*self.before_params(params), params).launch(
            grid=[grid_x, grid_y, grid_z],
            block=list(self.block),
            cluster=self.cluster if max(self.cluster) > 1 else None,
            smem=self.smem_bytes,
            min_blocks_per_mp=self.min_ctas,
            preferred_smem_carveout=100,  # percent; the default asks the driver, which compiles need not have
        )


class AttentionProgram(GridProgram):
    """Attention kernel, whose spec composes the mask of a work item and the modifications of its scores. `tile`: its
    products, and how scores lie in registers. Work items tell their `band`, their `rows` and where their mask bits are.
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
