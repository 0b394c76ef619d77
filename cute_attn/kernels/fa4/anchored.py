"""Softmax with anchors that trail the row's maximum, as in fa3: only the first kv tile is searched for its maximum.

The sums show afterwards whether exponentials overflowed the slack; S is intact until then, and P is computed anew from
it. So no row maximum, no hand-over of scale factors and no correction between S and P.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.column_words import hide
from cute_attn.kernels.blocks.pipeline import PipelineState
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.fa4.parts.exp2 import PairSums
from cute_attn.kernels.fa4.parts.rescale import rescale
from cute_attn.kernels.fa4.parts.row_masks import Word
from cute_attn.kernels.fa4.parts.umma import CHUNK_COLUMNS
from cute_attn.kernels.fa4.softmax_warps import RowState, SoftmaxContext, SoftmaxWarps


class AnchoredSoftmax(SoftmaxWarps):
    """Softmax warps whose rows keep their anchors from tile to tile."""

    @cute.jit
    def step(
        self,
        ring: cutlass.Constexpr,
        context: cutlass.Constexpr,
        s: PipelineState,
        state: RowState,
        kv_tile: Int32,
        first: Boolean,
        masked: cutlass.Constexpr,
    ) -> Any:
        """Computes P with the anchors of earlier tiles, and again where that exceeds the slack. The first tile has
        none, so it begins with raising them.
        """
        shift, total, context = state.shift, state.total, context.at(ring, s)
        words = self.words(context, kv_tile) if masked else [None for _ in self.tile.chunks]
        ring.wait_full(s)
        sm100.fence_after_sync()
        limit = Float32(self.limit(context))
        raises, pending = self.raises_first(state, kv_tile, first), Boolean(True)
        while pending:
            if raises:
                # At most once: even NaN and infinite scores do not exceed the limit then.
                limit = Float32(float("inf"))
                shift, total = self.raise_anchors(context, shift, total, kv_tile, first, masked)
            p, tile_total, level = self.probabilities(context, shift, kv_tile, words, masked)
            raises = cute.arch.vote_any_sync(level > limit)
            if not raises:
                self.store(ring, context, s, p)
                total = total + tile_total
            pending = raises
        return ring.next(s), RowState(shift, total)

    def probabilities(
        self, context: SoftmaxContext, shift: Float32, kv_tile: Int32, words: Sequence[Word | None], masked: bool
    ) -> tuple[list[Int32], Float32, Float32]:
        """Computes P of the thread's row, packed, its sum, and what must not exceed `limit`. A chunk is loaded while
        the one before is processed.
        """
        softmax, p = self.softmax_of(context, masked), []
        exp2: Any = softmax.exp2  # of pairs
        sums = exp2.zero_sums()
        shifts = softmax.finite([shift]) if masked else [shift]
        loaded = self.load(context, Int32(0))
        for chunk, word in zip(self.tile.chunks, words, strict=True):
            start = ptx.opaque(kv_tile * self.spec.tile.cols) + Int32(chunk * CHUNK_COLUMNS)
            s = sm100.wait_loads(loaded)
            if chunk + 1 in self.tile.chunks:
                loaded = self.load(context, Int32((chunk + 1) * CHUNK_COLUMNS))
            s = self.modified(context, s, start, None)
            s = self.visible(context, s, word()) if word else s
            exponentials = softmax.exponentials(s, shifts, may_be_empty=False)
            sums = exp2.add(sums, s, exponentials)
            p += self.tile.probabilities(exponentials)
        total = exp2.sum(sums)
        return p, total, self.level(sums, total)

    def softmax_of(self, context: SoftmaxContext, masked: bool) -> OnlineSoftmax:
        """Returns the softmax of a masked or of another tile: masks take issue slots, and so do polynomials."""
        softmax: Any = context.softmax
        return replace(softmax, exp2=softmax.exp2.beside_masks()) if masked else softmax

    @cute.jit
    def visible(self, context: cutlass.Constexpr, s: list[Float32], word: Int32) -> Any:
        """Hides columns of a chunk, unless all rows of the warp see all of it: at the diagonal, 1.5 of 4 on average."""
        if cute.arch.vote_any_sync(word != Int32(0)):
            s = hide(s, word, self.hidden(context))
        return s

    def limit(self, context: SoftmaxContext) -> float:
        """Returns the largest `level` with which P is kept."""
        return 2.0**context.softmax.slack * self.spec.tile.cols

    def level(self, sums: PairSums, total: Float32) -> Float32:
        """Returns what bounds the exponentials of a tile from above: their sum."""
        return total

    def raises_first(self, state: RowState, kv_tile: Int32, first: Boolean) -> Boolean:
        """Returns whether a kv tile begins with raising the anchors, the same for all threads of the warp."""
        return first

    @cute.jit
    def raise_anchors(
        self,
        context: cutlass.Constexpr,
        shift: Float32,
        total: Float32,
        kv_tile: Int32,
        first: Boolean,
        masked: cutlass.Constexpr,
    ) -> Any:
        """Moves the anchors of rows whose maximum exceeds the slack to it; rescales sums, and outputs unless there is
        none yet. A loop over small chunks, since it is rare.
        """
        high = Float32(ptx.NEG_INF)
        for column in cutlass.range(0, self.spec.tile.cols, CHUNK_COLUMNS, unroll=1):
            start = kv_tile * self.spec.tile.cols + column
            word = context.mask.word(start) if masked else None
            s = self.modified(context, sm100.wait_loads(self.load(context, column)), start, word)
            s = self.ascending(context, s)
            for i in cutlass.range_constexpr(0, CHUNK_COLUMNS, 2):
                high = sm100.fmax3_nan(high, s[i], s[i + 1])
        new, factor = self.raised(context, high, shift, total, kv_tile)
        columns = ptx.select(first, Int32(0), Int32(self.tile.output_columns))
        context.products.wait()
        rescale(context.o, columns, factor)
        return new, total * factor

    def ascending(self, context: SoftmaxContext, s: list[Float32]) -> list[Float32]:
        """Returns scores of which the largest has the largest exponential."""
        return s
