"""Masks of decode: length, causality and sliding window, or explicit mask bits of draft tokens."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.masks import COLUMNS, columns_before, columns_from, hide
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.layouts import TileLayout
from cute_attn.kernels.xqa.parts.partition import Segment
from cute_attn.kernels.xqa.spec import DecodeSpec, XqaSpec


@dataclass(frozen=True)
class DraftMask:
    """Mask of one segment. Row r of a request has position kv_len - qo_len + r and sees tokens [position - window_left,
    position]. With mask bits (`tree`), causality is replaced: of the last qo_len tokens it sees those whose bit is
    set."""

    p: Any  # XqaParams
    rows: PackedRows
    segment: Segment
    spec: DecodeSpec

    @property
    def prefix(self) -> Int32:
        """Number of tokens before the draft; all rows may see those."""
        return self.segment.request.kv_len - self.segment.request.qo_len

    def masks_part_of(self, start: Int32) -> Boolean:
        """Whether the mask may hide any token of the tile that starts at token `start` from any row."""
        request = self.segment.request
        window_start = self.prefix + request.qo_len - 1 - self.p.window_left  # first token that the last row sees
        common = 0 if self.spec.tree else 1  # draft tokens that all rows see: a tree may hide even the first
        return cutlass.or_(start + self.spec.cols > self.prefix + common, start < window_start)

    def visible(self, kv: Int32, position: Int32, token: Int32) -> Boolean:
        inside = [kv < self.segment.request.kv_len, kv >= position - self.p.window_left]
        if not self.spec.tree:
            return isa.all_of([*inside, kv <= position])
        draft = kv - self.prefix
        return isa.all_of([*inside, self.mask_bit(token, draft) != Int32(0)])

    def mask_bit(self, token: Int32, draft: Int32) -> Int32:
        """Mask bit of a draft token; 1 for tokens before the draft."""
        request = self.segment.request
        wanted = isa.all_of([draft >= 0, draft < request.qo_len, token < request.qo_len])
        row = self.p.mask + Int64(request.qo_start + token) * Int64(self.p.mask_row_bytes)
        word = ptx.load_word_if(wanted, row + Int64((draft >> 5) * 4))
        return ptx.select(draft < 0, Int32(1), (word >> (draft & 31)) & 1)


@dataclass(frozen=True)
class TileMask(DraftMask):
    """Mask of one segment for scores in the layout of mma.sync."""

    spec: XqaSpec
    layout: TileLayout  # which tokens they are of

    @cute.jit
    def apply(self, s: list[Float32], start: Int32) -> list[Float32]:
        lane = ptx.opaque(cute.arch.thread_idx()[0]) & 31
        kept = list(s)
        for block in cutlass.range_constexpr(self.spec.row_blocks):
            for column in cutlass.range_constexpr(2):
                row = self.spec.row((lane & 3) * 2 + column) + 8 * block
                token = self.rows.token(row)
                position = self.prefix + token
                for m in cutlass.range_constexpr(self.spec.cols // 16):
                    for half in cutlass.range_constexpr(2):
                        i = 4 * (m * self.spec.row_blocks + block) + 2 * half + column
                        kv = start + self.layout.lane_token(lane >> 2) + self.layout.token(m, half)
                        visible = self.visible(kv, position, token)
                        kept[i] = ptx.select(visible, kept[i], Float32(ptx.NEG_INF))
        return kept


@dataclass(frozen=True)
class TokenMask(DraftMask):
    """Mask of one segment for a thread that has one token. Packed rows are in the order of query tokens, so that those
    which see a token by causality and window are a range.
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
