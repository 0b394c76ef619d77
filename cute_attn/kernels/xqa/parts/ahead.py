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

from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.partition import make_partition
from cute_attn.kernels.xqa.parts.team import LoneWarp, WarpTeam
from cute_attn.kernels.xqa.spec import XqaSpec

FETCHED = 64  # bytes that come from memory at once


@dataclass(frozen=True)
class KeysAhead:
    """The first keys of a CTA, or of a warp that alone has a head, at most `spec.ahead`."""

    spec: XqaSpec
    team: LoneWarp | WarpTeam
    p: Any  # AheadParams

    @cute.jit
    def fetch(self) -> None:
        """Fetch them, each warp the columns that it copies."""
        p = self.p
        partition = make_partition(self.spec, p._replace(q_indptr=Int64(0)), isa.load_early_if)
        keys = partition.first_keys(self.spec.ahead)
        head = Int64(keys.head)
        k, v = p.k + head * p.k_stride_h, p.v + head * p.v_stride_h
        divisor = Divisor(p.page_size, p.page_multiplier, p.page_shift)
        threads = 32 * self.spec.teams
        for token in cutlass.range(keys.begin + self.team.thread(), keys.end, threads, unroll=2):
            number = divisor.quotient(token)
            entry, within = keys.first_page + number, token - number * p.page_size
            exists = isa.less_unsigned(entry, p.entries)
            page = isa.load_early_if(exists, isa.mad_wide(entry, Int32(4), p.table), 0)
            if isa.all_of([exists, isa.less_unsigned(page, p.pages)]):
                self.fetch_row(k, page * p.k_stride_page + within * p.k_stride_n)
                self.fetch_row(v, page * p.v_stride_page + within * p.v_stride_n)

    def fetch_row(self, base: Int64, place: Int32) -> None:
        """Fetch a warp's columns of a row of K or V, `place` units of 16 bytes behind `base`."""
        width = self.spec.warp_dim * self.spec.kv_bits // 8
        row = self.team.shifted(isa.mad_wide(place, Int32(16), base), width)
        for offset in range(0, width, FETCHED):
            isa.prefetch_l2(row + Int64(offset))
