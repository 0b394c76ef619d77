"""Base of all kernels: how they are traced and launched."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, Target
from cute_attn.kernels.blocks.masks import BandMask, KeyBounds, MultiItemMask, PackedMask, RangeMask, StopMask
from cute_attn.kernels.blocks.scalars import scalars_of, zeros
from cute_attn.kernels.blocks.scores import Alibi, RowScales, Scores, SoftCap
from cute_attn.schedule.records import NO_PARTIAL

# Makers of the row epilogues of final and of partial outputs.
Epilogues = tuple[Callable[[], FinalEpilogue], Callable[[], PartialEpilogue]]


class GridProgram:
    """Kernel of one spec. A subclass has `kernel`, its parameters and its block, and what is not as by default.
    `params`: a NamedTuple class of scalars, and of tuples of scalars.
    """

    params: Any
    kernel: Any
    block: tuple[int, int, int]
    smem_bytes = 0
    cluster = (1, 1, 1)
    min_ctas = 1  # per SM, that ptxas leaves registers for; 0: as it likes

    @property
    def scalars(self) -> dict[str, Any]:
        return scalars_of(self.params)

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

    def scores(self, p: Any, work: Any, lanes: Any, scales: list[Float32]) -> Scores:
        """Returns the modifications of scores. `scales`: of the thread's row slots."""
        makers: dict[str, Callable[[], Any]] = {
            "scale": lambda: self.scale_step(p, work, lanes, scales),
            "alibi": lambda: self.alibi_step(p, work, lanes),
            "soft_cap": lambda: SoftCap(p.soft_cap),
        }
        return Scores([makers[name]() for name in self.spec.scores])

    def scale_step(self, p: Any, work: Any, lanes: Any, scales: list[Float32]) -> RowScales:
        return RowScales(self.tile.scores_layout, lambda: scales)

    def alibi_step(self, p: Any, work: Any, lanes: Any) -> Any:
        return Alibi(self.tile.scores_layout, work.rows(p), lanes, p.num_qo_heads)

    # --- output -----------------------------------------------------------------------------------------------------

    @cute.jit
    def store(self, p: Any, work: cutlass.Constexpr, write: cutlass.Constexpr) -> None:
        """Calls `write(target, epilogue)` with the rows that a work item's results go to."""
        final_epilogue, partial_epilogue = self.epilogues(p, work)
        whole = Target(self.spec.out_dtype, p.o, p.o_stride_n, p.o_stride_h, p.lse, p.num_qo_heads)
        if cutlass.const_expr(self.spec.schedule == "items"):
            if work.partial == NO_PARTIAL:
                write(whole, final_epilogue())
            else:
                first = self.partial_row(p, work)
                write(Partials(p.o_partial, p.lse_partial, first, self.spec.head_dim_vo), partial_epilogue())
        elif cutlass.const_expr(self.spec.split):
            slab = Int64(work.partial) * Int64(p.qo_len) * Int64(p.num_qo_heads)
            o, lse = p.o + slab * (self.spec.head_dim_vo * 4), p.lse + slab * 4
            write(Target("float32", o, p.o_stride_n, p.o_stride_h, lse, p.num_qo_heads), partial_epilogue())
        else:
            write(whole, final_epilogue())

    def epilogues(self, p: Any, work: Any) -> Epilogues:
        """Returns how the row epilogues of final and of partial outputs are made."""
        raise NotImplementedError

    def partial_row(self, p: Any, work: Any) -> Int64:
        """Returns the first row of a work item in the workspace of partial outputs."""
        raise NotImplementedError
