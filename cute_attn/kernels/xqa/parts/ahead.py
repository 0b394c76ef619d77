"""What a CTA reads before the preceding kernel has ended, to start sooner: lengths, page ids and its first keys.

The preceding kernel may still write all of these. Keys are fetched into L2 alone, which keeps what is written later.
Lengths and page ids tell where the first tiles are; these are copied as soon as the preceding kernel has ended, while
lengths and page ids are read again. Where they have changed, the tiles are copied once more. Stale values only name
other lines of the cache: requests, heads, entries of the page table and pages are kept in bounds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.pages import PagedKv, TokenPages
from cute_attn.kernels.xqa.parts.partition import FirstKeys, Load, Segment, Share
from cute_attn.kernels.xqa.parts.team import LoneWarp, WarpTeam
from cute_attn.kernels.xqa.spec import XqaSpec

FETCHED = 64  # bytes that come from memory at once


class EarlyTiles(NamedTuple):
    """A CTA's first segment, and page ids of a warp's first tiles, before the preceding kernel has ended; without
    queries where their place must be read, since queries are not kept in bounds."""

    seen: list[Int32]  # what told the segment
    share: Share
    segment: Segment
    token_pages: list[TokenPages]  # of the first tiles, and of the tile that follows them

    def have_changed(self, seen: list[Int32], token_pages: list[TokenPages]) -> Boolean:
        """Whether any lane of the warp sees other lengths, or other pages in the entries of the page table from which
        the first tiles were copied."""
        found = zip(self.token_pages[:-1], token_pages[:-1], strict=True)
        pages = [pair for before, after in found for pair in zip(before.pages, after.pages, strict=True)]
        pairs = [*pages, *zip(self.seen, seen, strict=True)]
        return isa.ballot(functools.reduce(lambda a, b: a | b, (a ^ b for a, b in pairs)) != Int32(0)) != Int32(0)


def early_segment(found: tuple[Share, Segment], p: Any) -> tuple[Share, Segment]:
    """The first segment, in bounds; `p` are the parameters of the launch."""
    share, segment = found
    unit = ptx.maximum(ptx.minimum(segment.unit, p.num_kv_heads * p.row_blocks.value - 1), Int32(0))
    qo_len = ptx.select(p.q_indptr == Int64(0), segment.request.qo_len, Int32(0))
    return share, segment._replace(unit=unit, request=segment.request._replace(qo_len=qo_len))


def page_in_bounds(p: Any, entry: Int32, wanted: Boolean, load: Load = isa.load_early_if) -> Int32:
    """The page id of an entry of the page table, or 0 where it is not wanted or out of bounds."""
    exists = isa.all_of([wanted, isa.less_unsigned(entry, p.entries)])
    page = load(exists, isa.mad_wide(entry, Int32(4), p.table), 0)
    return ptx.select(isa.less_unsigned(page, p.pages), page, Int32(0))


def bounded(kv: PagedKv, segment: Segment, load: Load) -> PagedKv:
    """The keys and values of a segment that `early_segment` returned, which may be another one now: page ids are kept
    in bounds."""

    def page_id(exists: Boolean, index: Int32) -> Int32:
        return page_in_bounds(kv.p, segment.first_page + index, isa.all_of([exists, kv.p.pages > 0]), load)

    return replace(kv, page_id=page_id)


@dataclass(frozen=True)
class KeysAhead:
    """The first keys of a CTA, or of a warp that alone has a head."""

    spec: XqaSpec
    team: LoneWarp | WarpTeam
    p: Any  # AheadParams

    @cute.jit
    def fetch(self, keys: FirstKeys) -> None:
        """Fetch them into L2, each warp the columns that it copies."""
        p = self.p
        head = Int64(keys.head)
        k, v = p.k + head * p.k_stride_h, p.v + head * p.v_stride_h
        threads = 32 * self.spec.teams
        for token in cutlass.range(keys.begin + self.team.thread(), keys.end, threads, unroll=2):
            number = p.page_size.quotient(token)
            within = token - number * p.page_size.value
            page = page_in_bounds(p, keys.first_page + number, p.pages > 0)
            if p.pages > 0:
                self.fetch_row(k, page * p.k_stride_page + within * p.k_stride_n)
                self.fetch_row(v, page * p.v_stride_page + within * p.v_stride_n)

    def fetch_row(self, base: Int64, place: Int32) -> None:
        """Fetch a warp's columns of a row of K or V, `place` units of 16 bytes behind `base`."""
        width = self.spec.warp_dim * self.spec.kv_bits // 8
        row = self.team.shifted(isa.mad_wide(place, Int32(16), base), width)
        for offset in range(0, width, FETCHED):
            isa.prefetch_l2(row + Int64(offset))
