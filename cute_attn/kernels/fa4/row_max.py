"""Softmax with the maximum of every row and kv tile, as FlashAttention-4 has it: a thread keeps its row of scores.

Anchors move only where the maximum exceeds them by the slack. The factors for O that this implies go to the correction
warps, one per row and step, before the exponentials are computed.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100, tma
from cute_attn.kernels.blocks.pipeline import PipelineState
from cute_attn.kernels.fa4.parts.lanes import RowLanes
from cute_attn.kernels.fa4.parts.row_masks import Word
from cute_attn.kernels.fa4.parts.umma import CHUNK_COLUMNS
from cute_attn.kernels.fa4.softmax_warps import RowState, SoftmaxContext, SoftmaxWarps


class RowMaxSoftmax(SoftmaxWarps):
    """Softmax warps that compute row maxima."""

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
        """Computes P with anchors that trail the row maxima by no more than the slack."""
        context = context.at(ring, s)
        words = self.words(context, kv_tile) if masked else [None for _ in self.tile.chunks]
        ring.wait_full(s)
        sm100.fence_after_sync()
        context.stats.wait_empty(state.stats)  # before scores fill the registers
        scores, high = self.scores(context, kv_tile, words)
        shift, factor = self.raised(context, high, state.shift, state.total, kv_tile)
        self.publish_factor(context, state.stats, factor)
        p, tile_total = self.probabilities(context, scores, shift)
        self.store(ring, context, s, p)
        total = ptx.fma(state.total, factor, tile_total)
        return ring.next(s), RowState(shift, total, context.stats.next(state.stats))

    def scores(
        self, context: SoftmaxContext, kv_tile: Int32, words: Sequence[Word | None]
    ) -> tuple[list[list[Float32]], Float32]:
        """Returns the thread's row by chunks, and its maximum, NaN if a score is. A chunk is loaded while the one
        before is searched.
        """
        scores, highs = [], [Float32(ptx.NEG_INF), Float32(ptx.NEG_INF)]  # of pairs by turns: two chains of maxima
        loaded = self.load(context, Int32(0))
        for chunk, word in zip(self.tile.chunks, words, strict=True):
            start = ptx.opaque(kv_tile * self.spec.tile.cols) + Int32(chunk * CHUNK_COLUMNS)
            s = sm100.wait_loads(loaded)
            if chunk + 1 in self.tile.chunks:
                loaded = self.load(context, Int32((chunk + 1) * CHUNK_COLUMNS))
            s = self.modified(context, s, start, word() if word else None)
            for i in range(0, CHUNK_COLUMNS, 2):
                highs[i // 2 % 2] = sm100.fmax3_nan(highs[i // 2 % 2], s[i], s[i + 1])
            scores.append(s)
        return scores, sm100.fmax3_nan(highs[0], highs[1], highs[1])

    @cute.jit
    def publish_factor(self, context: cutlass.Constexpr, stats: PipelineState, factor: Float32) -> None:
        """Hands the factor for the row of O to the correction warps."""
        ring, lanes = context.stats, RowLanes.of(Int32(0), self.spec.tile.ctas)
        ptx.st_shared_f32(ring.address(stats) + lanes.lane_row * 8, factor)
        ptx.sync_warp()
        if lanes.lane == 0:
            tma.barrier_arrive(ring.full(stats))

    def probabilities(
        self, context: SoftmaxContext, scores: list[list[Float32]], shift: Float32
    ) -> tuple[list[Int32], Float32]:
        """Computes P of the thread's row, packed, and its sum."""
        softmax, p = context.softmax, []
        exp2: Any = softmax.exp2  # of pairs
        sums, shifts = exp2.zero_sums(), softmax.finite([shift])
        for s in scores:
            exponentials = softmax.exponentials(s, shifts, may_be_empty=False)
            sums = exp2.add(sums, [], exponentials)  # the maximum shows NaN, not the sums
            p += self.tile.probabilities(exponentials)
        return p, exp2.sum(sums)
