"""What a CTA reads before the preceding kernel has ended, to start sooner: lengths, page ids and its first keys.

The preceding kernel may still write all of these. Keys are fetched into L2 alone, which keeps what is written later.
Lengths and page ids tell where the first tiles are; these are copied as soon as the preceding kernel has ended, while
lengths and page ids are read again. Where they have changed, the tiles are copied once more. Stale values only name
other lines of the cache: requests, entries of the page table and pages are kept in bounds. Heads are so by themselves:
each length is read once, and the tickets, or the positions that these lengths add up to, have no other units.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.pages import PagedKv, TokenPages
from cute_attn.kernels.xqa.parts.partition import Load, Segment, Share


class EarlyTiles(NamedTuple):
    """A CTA's first segment, and page ids of a warp's first tiles, before the preceding kernel has ended; without
    queries where their place must be read, since queries are not kept in bounds."""

    seen: list[Int32]  # lengths by which the segment was found
    share: Share
    segment: Segment
    token_pages: list[TokenPages]  # of the first tiles

    def have_changed(self, seen: list[Int32], token_pages: list[TokenPages]) -> Boolean:
        """Whether any lane of the warp sees other lengths, or other pages in the entries of the page table from which
        the first tiles were copied."""
        found = zip(self.token_pages, token_pages, strict=True)
        pages = [pair for before, after in found for pair in zip(before.pages, after.pages, strict=True)]
        pairs = [*pages, *zip(self.seen, seen, strict=True)]
        return isa.ballot(functools.reduce(lambda a, b: a | b, (a ^ b for a, b in pairs)) != Int32(0)) != Int32(0)


def begins_with_queries(p: Any) -> Boolean:
    """Whether the first tiles are those of windows that begin where the queries do, which are not read early."""
    return isa.all_of([p.q_indptr != Int64(0), p.window_left < p.capacity])


def early_segment(found: tuple[Share, Segment], p: Any) -> tuple[Share, Segment]:
    """The first segment; without tiles where these are not known, or an empty cache has no page for stale
    lengths. `p` are the parameters of the launch."""
    share, segment = found
    request = segment.request
    qo_len = ptx.select(p.q_indptr == Int64(0), request.qo_len, Int32(0))
    tiles = ptx.select(isa.all_of([p.pages > 0, cutlass.not_(begins_with_queries(p))]), request.tiles, Int32(0))
    return share, segment._replace(request=request._replace(qo_len=qo_len, tiles=tiles))


def bounded(kv: PagedKv, segment: Segment, load: Load) -> PagedKv:
    """The keys and values of a segment that `early_segment` returned, which may be another one now: page ids are kept
    in bounds, 0 where they are not."""
    p = kv.p

    def page_id(exists: Boolean, index: Int32) -> Int32:
        entry = segment.first_page + index
        wanted = isa.all_of([exists, isa.less_unsigned(entry, p.entries)])
        page = load(wanted, isa.mad_wide(entry, Int32(4), p.table), 0)
        return ptx.select(isa.less_unsigned(page, p.pages), page, Int32(0))

    return replace(kv, page_id=page_id)
