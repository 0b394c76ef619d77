"""Mask of a thread that has one token, by query rows."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.column_words import COLUMNS, columns_before, columns_from, hide
from cute_attn.kernels.xqa.parts.masks import DraftMask


@dataclass(frozen=True)
class TokenMask(DraftMask):
    """Mask of one segment. Packed rows are in the order of query tokens, so that those which see a token by causality
    and window are a range.
    """

    @cute.jit
    def apply(self, s: list[Float32], kv: Int32) -> list[Float32]:
        """Sets the scores of token `kv` to -inf in rows that do not see it."""
        kept = []
        for first in cutlass.range_constexpr(0, self.spec.rows, COLUMNS):
            word = self.hidden_rows(kv, first)
            if cutlass.const_expr(self.spec.tree):
                word = word | self.hidden_by_tree(kv, first)
            kept += hide(s[first : first + COLUMNS], word, Float32(ptx.NEG_INF))
        return kept

    def hidden_rows(self, kv: Int32, first: int) -> Int32:
        """Returns the word of rows from `first` that do not see a token by length, window, and causality."""
        request, group = self.segment.request, self.rows.group.value
        draft, base = kv - self.prefix, self.rows.first + first
        last = ptx.minimum(draft + self.p.window_left, request.qo_len)  # query token
        stop = ptx.select(kv < request.kv_len, (last + 1) * group - base, Int32(0))
        if self.spec.tree:
            return columns_from(stop)
        return columns_from(stop) | columns_before(ptx.maximum(draft, Int32(0)) * group - base)

    @cute.jit
    def hidden_by_tree(self, kv: Int32, first: int) -> Int32:
        """Returns the word of rows from `first` whose mask bits hide a token."""
        word, draft = Int32(0), kv - self.prefix
        if draft >= 0:
            for i in cutlass.range(0, min(self.spec.rows, COLUMNS), unroll=1):
                seen = self.mask_bit(self.rows.token(first + i), draft)
                word = word | ((seen ^ 1) << i)
        return word
