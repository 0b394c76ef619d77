"""Softmax with anchors that trail the row's maximum, as in fa3: only the first kv tile is searched for its maximum.

The sums show afterwards whether exponentials overflowed the slack; S is intact until then, and P is computed anew from
it. So no row maximum, no hand-over of scale factors and no correction between S and P.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.pipeline import PipelineState
from cute_attn.kernels.fa4.parts.exp2 import PairSums
from cute_attn.kernels.fa4.parts.umma import CHUNK_COLUMNS
from cute_attn.kernels.fa4.softmax_warps import RowState, SoftmaxContext, SoftmaxWarps

RESCALED_COLUMNS = 16  # of O, at a time
HIDDEN = -1  # word of a chunk of which a row sees nothing


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

    def words(self, context: SoftmaxContext, kv_tile: Int32) -> list[Int32]:
        """Returns the mask of a kv tile: computed, or loaded, while its S is."""
        start = kv_tile * self.spec.tile.cols
        return [context.mask.word(start + Int32(chunk * CHUNK_COLUMNS)) for chunk in self.tile.chunks]

    def probabilities(
        self, context: SoftmaxContext, shift: Float32, kv_tile: Int32, words: list[Int32 | None], masked: bool
    ) -> tuple[list[Int32], Float32, Float32]:
        """Computes P of the thread's row, packed, its sum, and what must not exceed `limit`. A chunk is loaded while
        the one before is processed.
        """
        p, exp2 = [], self.exp2(context)
        sums = exp2.zero_sums()
        shifts = context.softmax.finite([shift]) if masked else [shift]
        loaded = self.load(context, Int32(0))
        for chunk, word in zip(self.tile.chunks, words, strict=True):
            start = ptx.opaque(kv_tile * self.spec.tile.cols) + Int32(chunk * CHUNK_COLUMNS)
            s = sm100.wait_loads(loaded)
            if chunk + 1 in self.tile.chunks:
                loaded = self.load(context, Int32((chunk + 1) * CHUNK_COLUMNS))
            of_chunk = self.chunk if word is None else self.masked_chunk
            packed, sums = of_chunk(context, s, shifts, sums, start, word)
            p += packed
        total = exp2.sum(sums)
        return p, total, self.level(sums, total)

    def chunk(
        self, context: SoftmaxContext, s: list[Float32], shifts: list[Float32], sums: Any, start: Int32, word: Any
    ) -> tuple[list[Int32], Any]:
        """Computes P of a chunk, packed, and adds its exponentials to the sums."""
        s = self.modified(context, s, start, word)
        exponentials = context.softmax.exponentials(s, shifts, may_be_empty=False)
        return self.tile.probabilities(exponentials), self.exp2(context).add(sums, s, exponentials)

    @cute.jit
    def masked_chunk(
        self,
        context: cutlass.Constexpr,
        s: list[Float32],
        shifts: list[Float32],
        sums: cutlass.Constexpr,
        start: Int32,
        word: Int32,
    ) -> Any:
        """Does the same unless the chunk is hidden from all rows of the warp: at the diagonal, on average 1.5 of 4."""
        packed = [Int32(0) for _ in range(CHUNK_COLUMNS * self.tile.memory.item_bytes // 4)]
        if cute.arch.vote_any_sync(word != Int32(HIDDEN)):
            packed, sums = self.chunk(context, s, shifts, sums, start, word)
        return packed, sums

    def exp2(self, context: SoftmaxContext) -> Any:
        """Returns the exponentials' strategy, of pairs."""
        return context.softmax.exp2

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
        self.rescale_output(context.o, columns, factor)
        return new, total * factor

    def raised(
        self, context: SoftmaxContext, high: Float32, shift: Float32, total: Float32, kv_tile: Int32
    ) -> tuple[Float32, Float32]:
        """Returns the shift of a row whose largest score of the tile is `high`, and the factor for what was summed."""
        softmax = context.softmax
        (old,) = softmax.finite([shift])
        new = softmax.anchor(high, 0)
        new = ptx.select(high == Float32(float("inf")), Float32(float("nan")), new)
        # The negation holds for NaN too, which spreads over the row.
        exceeds = Boolean(softmax.exponent(high, old) <= Float32(softmax.slack)) == Boolean(False)
        return ptx.select(exceeds, new, shift), ptx.select(exceeds, ptx.exp2(new - old), Float32(1.0))

    def ascending(self, context: SoftmaxContext, s: list[Float32]) -> list[Float32]:
        """Returns scores of which the largest has the largest exponential."""
        return s

    @cute.jit
    def rescale_output(self, o: Int32, columns: Int32, factor: Float32) -> None:
        factors = sm100.pair(factor, factor)
        for at in cutlass.range(0, columns, RESCALED_COLUMNS, unroll=1):
            values, scaled = sm100.wait_loads(sm100.load_columns(o + at, 0, RESCALED_COLUMNS)), []
            for i in cutlass.range_constexpr(0, RESCALED_COLUMNS, 2):
                scaled += sm100.halves(sm100.mul_pair(sm100.pair(values[i], values[i + 1]), factors))
            sm100.store_columns(o + at, 0, scaled)
        sm100.wait_stores()
