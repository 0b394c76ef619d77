"""Copies of query rows and of tiles of the latent cache into shared memory, by all threads of a CTA.

Eight threads copy a row, a line at a time: eight lines of latent columns, then one of rotated columns, which may be in
a tensor of their own. Rows that do not exist are filled with zeros: a NaN there would survive 0 * V.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import Divisor, PackedRows
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.mla.smem import ITEM_BYTES, MlaMemory
from cute_attn.kernels.mla.spec import LATENT
from cute_attn.kernels.xqa.parts import instructions as isa

LANES = 8  # threads of a row
LATENT_LINES = LATENT * ITEM_BYTES // LINE


class TokenPlaces(NamedTuple):
    """Pages and slots of the tokens of a tile that this thread copies."""

    pages: list[Int32]
    slots: list[Int32]


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
        return cute.arch.thread_idx()[0] // LANES

    @property
    def chunk(self) -> Int32:
        return cute.arch.thread_idx()[0] % LANES

    def copy(self, wanted: Boolean, shared: Int32, row: int, nope: Int64, rope: Int64, exists: Boolean) -> None:
        """Copy a row, `row` rows behind this thread's first, to a tile at `shared`. `nope`, `rope`: its parts."""
        target = shared + swizzled(self.row, self.chunk, self.memory.row_bytes)
        size, column = ptx.select(exists, Int32(CHUNK), Int32(0)), Int64(self.chunk * CHUNK)
        at = row * self.memory.row_bytes
        for line in range(LATENT_LINES):
            isa.copy_if(wanted, target, at + line * LINE, nope + column, line * LINE, size)
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

    def no_places(self) -> TokenPlaces:
        return TokenPlaces([Int32(0) for _ in self.tokens], [Int32(0) for _ in self.tokens])

    def places(self, tile: Int32, wanted: Boolean) -> TokenPlaces:
        """Read the page numbers of a tile's tokens; an unwanted tile reads nothing."""
        pages, slots = [], []
        divisor = Divisor(self.p.page_size, self.p.page_multiplier, self.p.page_shift)
        for first in self.tokens:
            token = tile * self.memory.spec.cols + (self.row + first)
            index = divisor.quotient(token)
            exists = isa.all_of([wanted, token < self.kv_len])
            pages.append(isa.load_if(exists, self.table + Int64(index) * Int64(4), 0, 1)[0])
            slots.append(token - index * self.p.page_size)
        return TokenPlaces(pages, slots)

    def fetch(self, places: TokenPlaces, tile: Int32, wanted: Boolean, shared: Int32) -> None:
        """Start copying a tile into the slot at `shared`, as one group, which is empty for an unwanted tile."""
        p = self.p
        for first, page, slot in zip(self.tokens, *places, strict=True):
            exists = tile * self.memory.spec.cols + (self.row + first) < self.kv_len
            ckv = isa.mad_wide(slot, p.ckv_stride_n, isa.mad_wide(page, p.ckv_stride_page, p.ckv))
            kpe = isa.mad_wide(slot, p.kpe_stride_n, isa.mad_wide(page, p.kpe_stride_page, p.kpe))
            self.copy(wanted, shared, first, ckv, kpe, exists)
        ptx.cp_async_commit()
