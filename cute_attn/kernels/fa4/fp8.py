"""Blackwell kernel for q, k and v in fp8: the roles and rings of the 16-bit kernel, at twice the products per clock.

V is MN-major as stored, which tcgen05 takes of any type: nothing is transposed. O is not promoted: how many bits a fp8
product accumulates in is not known of this chip.
"""

from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue
from cute_attn.kernels.blocks.fp8_scales import MIN_SCALE, row_scale, scaled_epilogues
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.scores import RowScales
from cute_attn.kernels.blocks.softmax import PEAK_LOG2
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.kernel import Fa4Program
from cute_attn.kernels.fa4.parts.fp8 import SUM_LIMIT, Fp8Exp2, Fp8Softmax, Fp8Sums, Fp8Tile
from cute_attn.kernels.fa4.parts.lanes import RowLanes
from cute_attn.kernels.fa4.smem import Fp8Memory
from cute_attn.kernels.fa4.softmax_warps import RowState, SoftmaxContext, SoftmaxWarps
from cute_attn.kernels.fa4.spec import Fa4Spec

RAISE_KEYS = 1024  # after which rows dominated by one key are raised in the range of e4m3


class Fp8SoftmaxWarps(SoftmaxWarps):
    """Softmax warps whose P is e4m3: rows with small sums are raised, so that probabilities far below the row's peak no
    longer underflow.
    """

    def limit(self, context: SoftmaxContext) -> float:
        return SUM_LIMIT

    def level(self, sums: Fp8Sums, total: Float32) -> Float32:  # type: ignore[override]
        return sums.largest

    def hidden(self, context: SoftmaxContext) -> Float32:
        softmax: Any = context.softmax
        return softmax.hidden

    def ascending(self, context: SoftmaxContext, s: list[Float32]) -> list[Float32]:
        softmax: Any = context.softmax
        return softmax.ascending(s)

    def due(self, kv_tile: Int32) -> Boolean:
        return kv_tile % (RAISE_KEYS // self.spec.tile.cols) == Int32(0)

    @cute.jit
    def raises_first(self, state: RowState, kv_tile: Int32, first: Boolean) -> Boolean:
        """Returns whether it is the first tile, or every `RAISE_KEYS` keys, whether any row of the warp has room."""
        raises = first
        if self.due(kv_tile):
            small = cutlass.and_(state.total > Float32(0.0), state.total < Float32(2.0 ** (PEAK_LOG2 - 1)))
            raises = cutlass.or_(first, cute.arch.vote_any_sync(small))
        return raises

    def raised(
        self, context: SoftmaxContext, high: Float32, shift: Float32, total: Float32, kv_tile: Int32
    ) -> tuple[Float32, Float32]:
        """Raises the row where its sum is small, beside what all forms do."""
        softmax: Any = context.softmax
        largest = softmax.exponent(high, softmax.finite([shift])[0])
        lowered, factor = super().raised(context, high, shift, total, kv_tile)
        fits = Boolean(largest <= Float32(softmax.slack))
        room = softmax.headroom(largest, total)
        grows = cutlass.and_(fits, self.due(kv_tile))
        return ptx.select(grows, shift + room, lowered), ptx.select(grows, ptx.exp2(room), factor)


class Fp8Program(Fa4Program):
    """Blackwell kernel for q, k and v in fp8."""

    memory: Fp8Memory
    tile: Fp8Tile
    softmax_warps_type: ClassVar = Fp8SoftmaxWarps

    def umma_tile(self, spec: Fa4Spec, memory: Fp8Memory) -> Fp8Tile:
        return Fp8Tile(spec.dtype, memory)

    def softmax(self, p: PersistentParams, work: QueryTile, lanes: RowLanes, scale: Any) -> Fp8Softmax:
        log2_scale = Float32(ptx.LOG2E)
        if not self.spec.scores:
            log2_scale = self.scale(p, work, lanes)
            small = ptx.magnitude(log2_scale) < Float32(MIN_SCALE)
            log2_scale = ptx.select(small, Float32(MIN_SCALE), log2_scale)
        exp2: Any = Fp8Exp2(self.spec.tile.polynomial)  # whose sums are of pairs
        return Fp8Softmax(self.tile.scores_layout, [log2_scale], exp2)

    def scale_step(self, p: PersistentParams, work: QueryTile, lanes: RowLanes, scale: Any) -> RowScales:
        scales = [self.scale(p, work, lanes)]
        return RowScales(self.tile.scores_layout, lambda: scales)

    def scale(self, p: PersistentParams, work: QueryTile, lanes: RowLanes) -> Float32:
        """Returns the scale of the thread's row."""
        return row_scale(p, work, work.rows(p).head(lanes.row(0)))

    def epilogues(self, p: PersistentParams, work: QueryTile) -> tuple[FinalEpilogue, PartialEpilogue]:
        return scaled_epilogues(p, work)
