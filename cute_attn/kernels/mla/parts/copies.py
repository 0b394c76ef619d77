"""Copies of query rows and of tiles of the latent cache into shared memory, by all threads of a CTA.

Eight threads copy a row, a line at a time: the lines of latent columns, then the rotated columns, which may be in a
tensor of their own. Rows that do not exist are filled with zeros: a NaN there would survive 0 * V.

A thread that has copied numbers of 8 bits converts the same ones: its part of a slot is its own, and needs no barrier.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant import Fp8, scaled
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.mla.smem import ITEM_BYTES, LANES, SCALE_BYTES, MlaMemory
from cute_attn.kernels.mla.spec import GROUP, LATENT
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.pages import TokenPages, page_id, token_pages

LATENT_LINES = LATENT * ITEM_BYTES // LINE


@dataclass(frozen=True)
class RowCopies:
    """How the threads of a CTA share rows in shared memory."""

    memory: MlaMemory
    p: Any  # MlaParams

    @property
    def step(self) -> int:
        """Rows that all threads copy at once."""
        return self.memory.spec.threads // LANES

    @property
    def row(self) -> Int32:
        return ptx.thread_index() // LANES

    @property
    def chunk(self) -> Int32:
        return ptx.thread_index() % LANES

    def copy(self, wanted: Boolean, shared: Int32, row: int, nope: Int64, rope: Int64, exists: Boolean) -> None:
        """Copy a row, `row` rows behind this thread's first, to a tile at `shared`. `nope`, `rope`: its parts."""
        target = shared + swizzled(self.row, self.chunk, self.memory.row_bytes)
        size, column = ptx.select(exists, Int32(CHUNK), Int32(0)), Int64(self.chunk * CHUNK)
        at = row * self.memory.row_bytes
        for line in range(LATENT_LINES):
            isa.copy_if(wanted, target, at + line * LINE, nope + column, line * LINE, size)
        if self.memory.spec.rope_bits:
            isa.copy_if(wanted, target, at + LATENT_LINES * LINE, rope + column, 0, size)


@dataclass(frozen=True)
class QueryCopies(RowCopies):
    def fetch(self, rows: PackedRows, shared: Int32) -> None:
        """Start copying the query rows of a segment."""
        p, count = self.p, self.memory.rows
        for first in range(0, count, self.step):
            row = self.row + first
            exists = rows.exists(row)
            nope = rows.address(p.q_nope, row, p.q_nope_stride_n, p.q_nope_stride_h)
            rope = rows.address(p.q_pe, row, p.q_pe_stride_n, p.q_pe_stride_h)
            self.copy(row < count, shared, first, nope, rope, exists)


@dataclass(frozen=True)
class TileCopies(RowCopies):
    """Tiles of one request. Tokens from `kv_len` on are not read."""

    table: Int64  # page numbers of the request
    kv_len: Int32

    @property
    def tokens(self) -> range:
        """The first token of each step."""
        return range(0, self.memory.spec.cols, self.step)

    def places(self, tile: Int32, wanted: Boolean) -> TokenPages:
        """Read the page numbers of the tokens of a tile that this thread copies; an unwanted tile reads nothing."""
        tokens = (tile * self.memory.spec.cols + (self.row + first) for first in self.tokens)
        exists = partial(self.exists, wanted)
        return token_pages(self.p, tokens, exists, partial(page_id, self.table))

    def exists(self, wanted: Boolean, token: Int32) -> Boolean:
        return isa.all_of([wanted, token < self.kv_len])

    def operand(self, slot: Int32) -> Int32:
        """Return where the tile in a slot is in 16 bits, for all threads; call it once, behind a barrier."""
        return slot

    def fetch(self, places: TokenPages, tile: Int32, wanted: Boolean, shared: Int32) -> None:
        """Start copying a tile into the slot at `shared`, as one group, which is empty for an unwanted tile."""
        p = self.p
        for first, page, slot in zip(self.tokens, *places, strict=True):
            exists = tile * self.memory.spec.cols + (self.row + first) < self.kv_len
            ckv = isa.mad_wide(slot, p.ckv_stride_n, isa.mad_wide(page, p.ckv_stride_page, p.ckv))
            kpe = isa.mad_wide(slot, p.kpe_stride_n, isa.mad_wide(page, p.kpe_stride_page, p.kpe))
            self.copy(wanted, shared, first, ckv, kpe, exists)
            self.copy_scales(wanted, shared, first, (page, slot), exists)
        ptx.cp_async_commit()

    def copy_scales(
        self, wanted: Boolean, shared: Int32, row: int, place: tuple[Int32, Int32], exists: Boolean
    ) -> None:
        """Start copying the scales of a row, where it has them."""


@dataclass(frozen=True)
class NarrowTileCopies(TileCopies):
    """Tiles of 8 bits, which become 16 in a tile of their own, behind the ring."""

    base: Int32  # of shared memory
    converter: Fp8

    @property
    def lines(self) -> range:
        return range(LATENT // LINE)

    @property
    def line_bytes(self) -> int:
        """Bytes that all threads copy of a line at once."""
        return self.memory.spec.threads * CHUNK

    @property
    def rotated_chunk(self) -> int:
        """Bytes of a thread's rotated numbers."""
        return self.memory.spec.rope_bits

    def own(self, slot: Int32, first: int) -> tuple[Int32, Int32, Int32]:
        """Addresses of this thread's latent chunks, of its rotated numbers and of its scale, of the row `first` behind
        its first."""
        thread, threads = ptx.thread_index(), self.memory.spec.threads
        rotated = len(self.lines) * self.line_bytes
        scales = rotated + threads * self.rotated_chunk
        step = scales + (threads * SCALE_BYTES if self.memory.spec.grouped else 0)
        start = slot + Int32(first // self.step * step)
        return (
            start + thread * CHUNK,
            start + Int32(rotated) + thread * self.rotated_chunk,
            start + Int32(scales) + thread * SCALE_BYTES,
        )

    def copy(self, wanted: Boolean, shared: Int32, row: int, nope: Int64, rope: Int64, exists: Boolean) -> None:
        latent, rotated, _ = self.own(shared, row)
        for line in self.lines:
            size = ptx.select(exists, Int32(CHUNK), Int32(0))
            isa.copy_if(wanted, latent, line * self.line_bytes, nope + Int64(self.chunk * CHUNK), line * LINE, size)
        if self.rotated_chunk:
            size = ptx.select(exists, Int32(self.rotated_chunk), Int32(0))
            source = rope + Int64(self.chunk * self.rotated_chunk)
            isa.copy_if(wanted, rotated, 0, source, 0, size, self.rotated_chunk)

    def copy_scales(
        self, wanted: Boolean, shared: Int32, row: int, place: tuple[Int32, Int32], exists: Boolean
    ) -> None:
        """Start copying the scales of a row: a thread copies one, of the group of its number."""
        if not self.memory.spec.grouped:
            return
        p, (page, slot), group = self.p, place, self.chunk & (LATENT // GROUP - 1)
        scales = isa.mad_wide(page, p.ckv_scales_stride_page, p.ckv_scales + Int64(group * SCALE_BYTES))
        scales = isa.mad_wide(slot, p.ckv_scales_stride_n, scales)
        size = ptx.select(exists, Int32(SCALE_BYTES), Int32(0))
        isa.copy_if(wanted, self.own(shared, row)[2], 0, scales, 0, size, SCALE_BYTES)

    def operand(self, slot: Int32) -> Int32:
        tile = self.base + Int32(self.memory.tile)
        for first in self.tokens:
            latent, rotated, scale = self.own(slot, first)
            row, at = tile + self.row * self.memory.row_bytes, first * self.memory.row_bytes
            for line in self.lines:
                words = self.converter.pairs(ptx.ld_shared_v4(latent, line * self.line_bytes), Int32(0))
                if self.memory.spec.grouped:
                    words = scaled(self.memory.spec.dtype, words, self.scale_of(line, scale))
                for half in range(2):
                    place = row + self.position(self.chunk * 2 + half)
                    ptx.st_shared_v4(place, at + line * 2 * LINE, words[4 * half : 4 * half + 4])
            if self.rotated_chunk:
                ptx.st_shared_v4(row + self.position(self.chunk), at + LATENT_LINES * LINE, self.rotated(rotated))
        ptx.sync_threads()
        return tile

    def rotated(self, address: Int32) -> list[Int32]:
        """Return this thread's eight rotated numbers in 16 bits."""
        if self.rotated_chunk == CHUNK:
            return ptx.ld_shared_v4(address)
        return self.converter.pairs(ptx.ld_shared_v2(address), Int32(0))

    def scale_of(self, group: int, address: Int32) -> Float32:
        """Return a scale of this thread's row, which the row's thread of that number has copied."""
        row_lane = ptx.thread_index() & Int32(32 - LANES)
        return ptx.from_bits(ptx.shuffle_from(ptx.ld_shared_b32(address), row_lane + group))

    def position(self, chunk: Int32) -> Int32:
        """Offset in this thread's row of chunk 0 to 15 of a pair of lines."""
        return (chunk ^ (self.row & 7)) * CHUNK
