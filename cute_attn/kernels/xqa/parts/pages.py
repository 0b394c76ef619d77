"""Copies of K and V tiles from a paged cache into one warp's ring."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.spec import LINE, XqaMemory

CHUNK = 16


def spread(row: Int32, row_bytes: int) -> Int32:
    """What the chunk index of a row is xored with: the eight rows of an ldmatrix matrix then differ in bank."""
    per_line = max(1, LINE // row_bytes)
    chunks = min(row_bytes, LINE) // CHUNK
    return (row >> (per_line.bit_length() - 1)) & (chunks - 1)


def place(row: Int32, chunk: Int32, row_bytes: int) -> Int32:
    """Offset of a 16-byte chunk (of the row's first line) in a tile."""
    return row * row_bytes + ((chunk ^ spread(row, row_bytes)) * CHUNK)


class Located(NamedTuple):
    """Where the tokens of a tile lie in the cache: lane l has those of tokens l, l + 32, ..."""

    pages: list[Int32]
    slots: list[Int32]  # within the page


@dataclass(frozen=True)
class PagedTile:
    """K and V of one request and kv head. Tokens outside [first_token, kv_len) are not read, and become zeros: a NaN
    there would survive 0 * V."""

    memory: XqaMemory
    p: Any  # XqaParams
    table: Int64  # page indices of the request
    head: Int32
    first_token: Int32
    kv_len: Int32

    @property
    def lanes(self) -> int:
        """Lanes that copy one row side by side."""
        return min(self.memory.row_bytes, LINE) // CHUNK

    @property
    def lines(self) -> int:
        return max(1, self.memory.row_bytes // LINE)

    @property
    def passes(self) -> int:
        """Times that the warp copies a line of as many rows as it can."""
        return self.memory.cols * self.lanes // 32

    @property
    def count(self) -> int:
        """Steps of `copies`."""
        return self.passes

    def readable(self, token: Int32) -> Boolean:
        return isa.below(token - self.first_token, self.kv_len - self.first_token)

    def nowhere(self) -> Located:
        words = range(0, self.memory.cols, 32)
        return Located([Int32(0) for _ in words], [Int32(0) for _ in words])

    def locate(self, tile: Int32, wanted: Boolean) -> Located:
        """Reads the page indices of a tile's tokens; of an unwanted tile none."""
        pages, slots = [], []
        lane = cute.arch.thread_idx()[0] & 31
        divisor = Divisor(self.p.page_size, self.p.page_multiplier, self.p.page_shift)
        for start in range(0, self.memory.cols, 32):
            token = tile * self.memory.cols + (lane + start)
            index = divisor.quotient(token)
            exists = isa.all_of([wanted, self.readable(token)])
            pages.append(isa.load_if(exists, self.table + Int64(index) * Int64(4), 0, 1)[0])
            slots.append(token - index * self.p.page_size)
        return Located(pages, slots)

    def copies(self, located: Located, tile: Int32, wanted: Boolean, slot: Int32) -> Iterator[None]:
        """The copies of a tile into the ring slot at shared address `slot`, some per `next`; unwanted: none."""
        memory, p = self.memory, self.p
        lane = ptx.opaque(cute.arch.thread_idx()[0]) & 31
        row, chunk = lane // self.lanes, lane % self.lanes
        offset = Int64(chunk * CHUNK)
        k = p.k + Int64(self.head) * p.k_stride_h + offset
        v = p.v + Int64(self.head) * p.v_stride_h + offset
        shared = slot + place(row, chunk, memory.row_bytes)
        start = tile * memory.cols
        left = self.kv_len - self.first_token
        step = 32 // self.lanes
        places = [
            (page * p.k_stride_page + token * p.k_stride_n, page * p.v_stride_page + token * p.v_stride_n)
            for page, token in zip(located.pages, located.slots, strict=True)
        ]
        for i in range(self.passes):
            first = i * step
            k_place, v_place = (isa.shuffle(x, row + first % 32) for x in places[first // 32])
            exists = isa.below(start + row + (first - self.first_token), left)
            size = ptx.select(exists, Int32(CHUNK), Int32(0))
            # `row` has the low bits of row + first: the spreads of both parts add up, as xor.
            turn = self._turn(first)
            target = shared ^ Int32(turn) if turn else shared
            k_at, v_at = isa.mad_wide(k_place, Int32(CHUNK), k), isa.mad_wide(v_place, Int32(CHUNK), v)
            for line in range(self.lines):
                at = first * memory.row_bytes + line * LINE
                isa.copy_if(wanted, target, at, k_at, line * LINE, size)
                isa.copy_if(wanted, target, memory.v + at, v_at, line * LINE, size)
            if i == 0:
                self._copy_scales(located, start, wanted, slot)
            yield

    def _turn(self, first: int) -> int:
        per_line = max(1, LINE // self.memory.row_bytes)
        return ((first // per_line) & (self.lanes - 1)) * CHUNK

    def _copy_scales(self, located: Located, start: Int32, wanted: Boolean, slot: Int32) -> None:
        """Block scales: a token is one copy, which its lane can make on its own."""
        memory, p, size = self.memory, self.p, self.memory.scale_bytes
        if not size:
            return
        lane = ptx.opaque(cute.arch.thread_idx()[0]) & 31
        k, v = p.k_sf + Int64(self.head) * p.k_sf_stride_h, p.v_sf + Int64(self.head) * p.v_sf_stride_h
        if memory.cols < 32:
            wanted = isa.all_of([wanted, lane < memory.cols])
        for i, (page, token) in enumerate(zip(located.pages, located.slots, strict=True)):
            present = ptx.select(self.readable(start + lane + 32 * i), Int32(size), Int32(0))
            k_at = isa.mad_wide(token, p.k_sf_stride_n, isa.mad_wide(page, p.k_sf_stride_page, k))
            v_at = isa.mad_wide(token, p.v_sf_stride_n, isa.mad_wide(page, p.v_sf_stride_page, v))
            target = slot + lane * size
            for source, base in ((k_at, memory.k_scales), (v_at, memory.v_scales)):
                isa.copy_small_if(wanted, target, base + 32 * i * size, source, size, present)
