"""Keys that a CTA fetches into L2 while the preceding kernel ends.

Where they are follows from lengths and page ids that the preceding kernel may still write. What is read of those before
it has ended decides which lines are fetched, nothing else: stale values fetch other lines of the cache. Requests,
heads, entries of the page table and pages are kept in bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.partition import make_partition
from cute_attn.kernels.xqa.spec import XqaSpec

FETCHED = 64  # bytes that come from memory at once


@dataclass(frozen=True)
class KeysAhead:
    """The first keys of a CTA, at most `spec.ahead`."""

    spec: XqaSpec
    p: Any  # AheadParams

    @cute.jit
    def fetch(self) -> None:
        """Fetch them, in CTAs that may have started before the preceding kernel ended. Others have no time for it."""
        x, y, _ = cute.arch.block_idx()
        if y * cute.arch.grid_dim()[0] + x < self.p.resident:
            self.fetch_keys()

    @cute.jit
    def fetch_keys(self) -> None:
        first_page, head, begin, end = self.place()
        p, threads = self.p, 32 * self.spec.warps
        divisor = Divisor(p.page_size, p.page_multiplier, p.page_shift)
        for token in cutlass.range(begin + cute.arch.thread_idx()[0], end, threads, unroll=2):
            number = divisor.quotient(token)
            entry, within = first_page + number, token - number * p.page_size
            exists = isa.less_unsigned(entry, p.entries)
            page = isa.load_early_if(exists, isa.mad_wide(entry, Int32(4), p.table), 0)
            if isa.all_of([exists, isa.less_unsigned(page, p.pages)]):
                self.fetch_token(Int64(head), page, within)

    def place(self) -> tuple[Int32, Int32, Int32, Int32]:
        """Index of the first page id, kv head and tokens [begin, end) of this CTA's first segment, as far as lengths
        tell that may change until they are read again."""
        p, cols = self.p, self.spec.cols
        partition = make_partition(self.spec, p._replace(q_indptr=Int64(0)), isa.load_early_if)
        share, segment = partition.first_segment()
        split, request = partition.split(segment, share), segment.request
        first_tile = request.first_token // cols
        begin = ptx.maximum((first_tile + split.begin) * cols, request.first_token)
        end = ptx.minimum(ptx.minimum((first_tile + split.end) * cols, request.kv_len), begin + self.spec.ahead)
        head = ptx.maximum(ptx.minimum(partition.head(segment), p.num_kv_heads - 1), Int32(0))
        return segment.first_page, head, begin, end

    def fetch_token(self, head: Int64, page: Int32, within: Int32) -> None:
        """Fetch a row of K and one of V."""
        p, columns = self.p, self.spec.head_dim * self.spec.kv_bits // 8
        k_at = isa.mad_wide(page * p.k_stride_page + within * p.k_stride_n, Int32(16), p.k + head * p.k_stride_h)
        v_at = isa.mad_wide(page * p.v_stride_page + within * p.v_stride_n, Int32(16), p.v + head * p.v_stride_h)
        for offset in range(0, columns, FETCHED):
            isa.prefetch_l2(k_at + Int64(offset))
            isa.prefetch_l2(v_at + Int64(offset))
