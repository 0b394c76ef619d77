"""Copies of K and V tiles from a paged cache into one warp's ring."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import CHUNK, present, swizzled_offset
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.layouts import TileLayout
from cute_attn.kernels.xqa.parts.team import LoneWarp, WarpTeam
from cute_attn.kernels.xqa.smem import XqaMemory

FETCHED = 64  # bytes that come from memory at once


class TokenPages(NamedTuple):
    """Cache positions of some tokens of a tile: lane l of a warp has those of tokens l, l + 32, ... in XQA."""

    pages: list[Int32]
    offsets: list[Int32]  # of the tokens, within their pages


LoadPageId = Callable[[Boolean, Int32], Int32]  # the id of the request's page of this index, if it is wanted


def token_pages(p: Any, tokens: Iterable[Int32], exists: Callable[[Int32], Boolean], load: LoadPageId) -> TokenPages:
    """Read the page ids of tokens; nothing of one that does not exist."""
    pages, offsets = [], []
    for token in tokens:
        index = p.page_size.quotient(token)
        pages.append(load(exists(token), index))
        offsets.append(token - index * p.page_size.value)
    return TokenPages(pages, offsets)


def page_id(table: Int64, exists: Boolean, index: Int32) -> Int32:
    """Read the id of page `index` of the request whose page ids are at `table`."""
    return ptx.load_word_if(exists, table + Int64(index) * Int64(4))


@dataclass(frozen=True)
class PagedKv:
    """Paged K and V of one request and kv head, of which a warp copies its columns. Tokens outside [first_token,
    kv_len) are not read but zero-filled: a NaN there would survive 0 * V."""

    memory: XqaMemory
    layout: TileLayout
    team: LoneWarp | WarpTeam
    p: Any  # XqaParams
    page_id: LoadPageId
    head: Int32
    first_token: Int32
    kv_len: Int32

    @property
    def copy_steps(self) -> int:
        """Steps of `copies`, each of which copies as many rows as the warp can at once."""
        return self.memory.spec.cols // self.layout.rows_per_step

    def readable(self, token: Int32) -> Boolean:
        return isa.less_unsigned(token - self.first_token, self.kv_len - self.first_token)

    def no_pages(self) -> TokenPages:
        words = range(0, self.memory.spec.cols, 32)
        return TokenPages([Int32(0) for _ in words], [Int32(0) for _ in words])

    def prefetch_page_ids(self, tile: Int32, wanted: Boolean) -> TokenPages:
        """Read the page ids of a tile's tokens; an unwanted tile reads nothing."""
        lane = cute.arch.thread_idx()[0] & 31
        tokens = (tile * self.memory.spec.cols + (lane + start) for start in range(0, self.memory.spec.cols, 32))
        return token_pages(self.p, tokens, lambda token: isa.all_of([wanted, self.readable(token)]), self.page_id)

    def fetch(self, token_pages: TokenPages, tile: Int32, wanted: Boolean) -> None:
        """Fetch a tile into L2, each lane the rows of its tokens."""
        p, cols, width = self.p, self.memory.spec.cols, self.memory.source_bytes
        lane, head = cute.arch.thread_idx()[0] & 31, Int64(self.head)
        if cols < 32:
            wanted = isa.all_of([wanted, lane < cols])
        k, v = (self.team.shifted(x, width) for x in (p.k + head * p.k_stride_h, p.v + head * p.v_stride_h))
        for i, places in enumerate(self.places(token_pages)):
            exists = isa.all_of([wanted, self.readable(tile * cols + (lane + 32 * i))])
            for place, base in zip(places, (k, v), strict=True):
                row = isa.mad_wide(place, Int32(CHUNK), base)
                for offset in range(0, width, FETCHED):
                    isa.prefetch_l2_if(exists, row, offset)

    def places(self, token_pages: TokenPages) -> list[tuple[Int32, Int32]]:
        """Where the rows of K and V of this lane's tokens are behind those of page 0, in chunks."""
        p = self.p
        return [
            (page * p.k_stride_page + token * p.k_stride_n, page * p.v_stride_page + token * p.v_stride_n)
            for page, token in zip(token_pages.pages, token_pages.offsets, strict=True)
        ]

    def copies(self, token_pages: TokenPages, tile: Int32, wanted: Boolean, slot: Int32) -> Iterator[None]:
        """Copy a tile into the ring slot at shared address `slot`, one step per `next`, so that the caller can
        interleave copies with MMAs. An unwanted tile copies nothing."""
        memory, layout, p = self.memory, self.layout, self.p
        lines = -(-memory.source_bytes // LINE)  # that hold columns; others are neither filled nor read
        lane = ptx.opaque(cute.arch.thread_idx()[0]) & 31
        row, chunk = lane // layout.lanes_per_row, lane % layout.lanes_per_row
        offset = self.team.shifted(Int64(chunk * CHUNK), memory.source_bytes)
        k = p.k + Int64(self.head) * p.k_stride_h + offset
        v = p.v + Int64(self.head) * p.v_stride_h + offset
        shared = slot + layout.offset(row, chunk)
        start = tile * memory.spec.cols
        left = self.kv_len - self.first_token
        places = self.places(token_pages)
        for i in range(self.copy_steps):
            first = i * layout.rows_per_step
            k_place, v_place = (ptx.shuffle_from(x, row + first % 32) for x in places[first // 32])
            exists = isa.less_unsigned(start + row + (first - self.first_token), left)
            size = ptx.select(exists, Int32(CHUNK), Int32(0))
            bits = layout.step_bits(first)
            target = shared ^ Int32(bits) if bits else shared
            k_at, v_at = isa.mad_wide(k_place, Int32(CHUNK), k), isa.mad_wide(v_place, Int32(CHUNK), v)
            for right in range(0, layout.chunks_per_line * lines, layout.lanes_per_row):
                to, within = swizzled_offset(target, right)
                at = first * memory.row_bytes + within
                # Beyond the last column zeros are filled in: an ldmatrix may read them.
                part = present(chunk, memory.source_bytes // CHUNK - right, layout.lanes_per_row, size)
                isa.copy_if(wanted, to, at, k_at, right * CHUNK, part)
                isa.copy_if(wanted, to, memory.v + at, v_at, right * CHUNK, part)
            if i == 0:
                self._copy_scales(token_pages, start, wanted, slot)
            yield

    def _copy_scales(self, token_pages: TokenPages, start: Int32, wanted: Boolean, slot: Int32) -> None:
        """Copy block scales: one cp.async per token and tensor, issued by the token's lane."""
        memory, p, size = self.memory, self.p, self.memory.scale_bytes
        if not size:
            return
        lane = ptx.opaque(cute.arch.thread_idx()[0]) & 31
        k, v = (
            self.team.shifted(base + Int64(self.head) * stride, size)
            for base, stride in ((p.k_scales, p.k_scales_stride_h), (p.v_scales, p.v_scales_stride_h))
        )
        if memory.spec.cols < 32:
            wanted = isa.all_of([wanted, lane < memory.spec.cols])
        for i, (page, token) in enumerate(zip(token_pages.pages, token_pages.offsets, strict=True)):
            part = ptx.select(self.readable(start + lane + 32 * i), Int32(size), Int32(0))
            k_at = isa.mad_wide(token, p.k_scales_stride_n, isa.mad_wide(page, p.k_scales_stride_page, k))
            v_at = isa.mad_wide(token, p.v_scales_stride_n, isa.mad_wide(page, p.v_scales_stride_page, v))
            target = slot + lane * size
            for source, base in ((k_at, memory.k_scales), (v_at, memory.v_scales)):
                isa.copy_if(wanted, target, base + 32 * i * size, source, 0, part, size)
