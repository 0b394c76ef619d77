"""Producer warpgroup of the kernel on wgmma: query rows and tiles of the latent cache, into columns of lines.

Eight threads have a row, sixteen bytes of each of its lines. Rows that do not exist are filled with zeros: a NaN there
would survive 0 * V. Pages may have any size: every thread looks up the page of each of its rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.dequant import Fp8, scaled
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.mla.hopper.rings import NO_WORK, PRODUCERS, Rings, SegmentRecord
from cute_attn.kernels.mla.smem import ROTATED, HopperMlaMemory
from cute_attn.kernels.mla.spec import GROUP
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.partition import KvSplit, Segment

LANES = LINE // CHUNK  # threads of a row
STEP = PRODUCERS // LANES  # rows that all threads copy at once


class Source(NamedTuple):
    """Where this thread's chunk of a row is in the cache, and the row's scales."""

    latent: Int64
    rotated: Int64
    scales: Int64
    exists: Boolean


class Ahead(NamedTuple):
    """Numbers of half a tile on their way: words of each row and column of lines, and the scales of the first row."""

    words: list[list[list[Int32]]]
    scales: list[Float32]


class Tile(NamedTuple):
    """A tile of a segment, and the page numbers of this thread's rows; it has no rows if it is not `wanted`."""

    segment: Segment
    index: Int32
    wanted: Boolean
    pages: list[Int32]


Half = tuple[Tile, range]  # and its columns of lines


@dataclass(frozen=True)
class Producer:
    """Copies of 16-bit caches, by cp.async."""

    memory: HopperMlaMemory
    p: Any  # MlaParams
    rings: Rings

    @property
    def row(self) -> Int32:
        """First row of this thread."""
        return (ptx.thread_index() & Int32(PRODUCERS - 1)) // LANES

    @property
    def chunk(self) -> Int32:
        return ptx.thread_index() % LANES

    @property
    def steps(self) -> range:
        return range(0, self.memory.spec.cols, STEP)

    def target(self, tile: Int32) -> Int32:
        """Address of this thread's chunk of its first row, in the first column of a tile."""
        return tile + swizzled(self.row, self.chunk, LINE)

    # --- query rows --------------------------------------------------------------------------------------------------

    @cute.jit
    def hand_over(self, record: SegmentRecord, q: PipelineState) -> None:
        """Leave a record to the MMA warpgroups, once there is room for it and for query rows."""
        self.rings.q.wait_empty(q)
        if ptx.thread_index() == self.memory.spec.mma_threads:
            record.store(self.rings.record(q))
            # Copies arrive when they are complete, which says nothing of this store: its own arrival does.
            tma.barrier_arrive(self.rings.q.full(q))

    def copy_queries(self, rows: PackedRows, q: PipelineState) -> None:
        """Start copying the query rows of a segment."""
        p, ring = self.p, self.rings.q
        target, column = self.target(ring.data), Int64(self.chunk * CHUNK)
        for first in self.steps:
            row = self.row + first
            nope = rows.address(p.q_nope, row, p.q_nope_stride_n, p.q_nope_stride_h) + column
            rope = rows.address(p.q_pe, row, p.q_pe_stride_n, p.q_pe_stride_h) + column
            size = ptx.select(rows.exists(row), Int32(CHUNK), Int32(0))
            self.copy_row(target, first, (nope, rope), size, range(self.memory.columns))
        ptx.cp_async_arrive(ring.full(q))

    def end(self, q: PipelineState) -> None:
        """Tell the MMA warpgroups that no segments are left. Q is free, so they have waited for all copies."""
        record = SegmentRecord(*(Int32(NO_WORK) for _ in SegmentRecord._fields))
        self.hand_over(record, q)
        tma.barrier_arrive(self.rings.q.full(q))

    def copy_row(self, target: Int32, first: int, sources: tuple[Int64, Int64], size: Int32, columns: range) -> None:
        """Start copying this thread's chunk of some lines of a row, `first` rows behind its first."""
        for column in columns:
            offset = column * self.memory.column_bytes + first * LINE
            if column == ROTATED:
                ptx.cp_async(target, offset, sources[1], 0, size)
            else:
                ptx.cp_async(target, offset, sources[0], column * LINE, size)

    # --- tiles -------------------------------------------------------------------------------------------------------

    def tile(self, segment: Segment, split: KvSplit, index: Int32) -> Tile:
        """Read the page numbers of a tile, which has no rows behind the end of the split."""
        tile, pages = Tile(segment, index, index < split.end, []), []
        table = isa.mad_wide(segment.first_page, Int32(4), self.p.table)
        for first in self.steps:
            page = self.p.page_size.quotient(self.token(tile, first))
            pages.append(ptx.load_word_if(self.exists(tile, first), table + Int64(page) * Int64(4)))
        return tile._replace(pages=pages)

    def token(self, tile: Tile, first: int) -> Int32:
        return tile.index * self.memory.spec.cols + (self.row + first)

    def exists(self, tile: Tile, first: int) -> Boolean:
        return isa.all_of([tile.wanted, self.token(tile, first) < tile.segment.request.kv_len])

    def source(self, tile: Tile, i: int) -> Source:
        """Return where row `i` of this thread is. Found out for each half again: registers for it are lacking."""
        p, page, first = self.p, tile.pages[i], self.steps[i]
        token = self.token(tile, first)
        slot = token - p.page_size.quotient(token) * p.page_size.value
        latent = isa.mad_wide(slot, p.ckv_stride_n, isa.mad_wide(page, p.ckv_stride_page, p.ckv))
        rotated = isa.mad_wide(slot, p.kpe_stride_n, isa.mad_wide(page, p.kpe_stride_page, p.kpe))
        spec, scales = self.memory.spec, Int64(0)
        if spec.grouped:
            start = isa.mad_wide(page, p.ckv_scales_stride_page, p.ckv_scales)
            scales = isa.mad_wide(slot, p.ckv_scales_stride_n, start)
        latent, rotated = latent + self.column(spec.kv_bits), rotated + self.column(spec.rope_bits)
        return Source(latent, rotated, scales, self.exists(tile, first))

    def column(self, bits: int) -> Int64:
        """Return the offset of this thread's eight numbers in a line of its row."""
        return Int64(self.chunk * bits)

    @cute.jit
    def copy_tiles(self, tile: Tile, split: KvSplit, state: PipelineState) -> PipelineState:
        """Copy the tiles of a segment from its first on. Page numbers are read a tile ahead."""
        segment, pages = tile.segment, tile.pages
        for index in cutlass.range(split.begin, split.end, unroll=1):
            tile, following = Tile(segment, index, Boolean(True), pages), self.tile(segment, split, index + 1)
            for half, columns in enumerate(self.memory.halves):
                self.copy_half(self.rings.half(half), state, tile, columns)
            pages, state = following.pages, self.rings.half(0).next(state)
        return state

    def copy_half(self, ring: Ring, state: PipelineState, tile: Tile, columns: range) -> None:
        ring.wait_empty(state)
        target = self.target(ring.address(state))
        for i, first in enumerate(self.steps):
            source = self.source(tile, i)
            size = ptx.select(source.exists, Int32(CHUNK), Int32(0))
            self.copy_row(target, first, (source.latent, source.rotated), size, columns)
        ptx.cp_async_arrive(ring.full(state))


@dataclass(frozen=True)
class NarrowProducer(Producer):
    """Copies of 8-bit caches through registers, where they become 16-bit numbers. A thread loads its part of half a
    tile; as soon as a row is converted, its registers receive the same row of the next half."""

    converter: Fp8
    rotated_factor: Float32  # of rotated numbers, whose scale is not that of the latent ones

    @cute.jit
    def copy_tiles(self, tile: Tile, split: KvSplit, state: PipelineState) -> PipelineState:
        left, right = self.memory.halves
        segment, pages = tile.segment, tile.pages
        ahead = Ahead([self.load(tile, i, left) for i in range(len(self.steps))], self.load_scales(tile, 0, left))
        for index in cutlass.range(split.begin, split.end, unroll=1):
            tile, following = Tile(segment, index, Boolean(True), pages), self.tile(segment, split, index + 1)
            ahead = self.move(self.rings.half(0), state, ahead, (tile, left), (tile, right))
            ahead = self.move(self.rings.half(1), state, ahead, (tile, right), (following, left))
            pages, state = following.pages, self.rings.half(0).next(state)
        return state

    def load(self, tile: Tile, i: int, columns: range) -> list[list[Int32]]:
        """Load eight numbers of each of some columns of row `i` of this thread; zeros where there is no row."""
        source, words = self.source(tile, i), []
        for column in columns:
            if column == ROTATED:
                words.append(ptx.load_if(source.exists, source.rotated, 0, self.memory.spec.rope_bits // 4))
            else:
                words.append(ptx.load_if(source.exists, source.latent, column * LINE // 2, 2))
        return words

    def load_scales(self, tile: Tile, i: int, columns: range) -> list[Float32]:
        """Load the scales of half of row `i`, if groups have their own."""
        if not self.memory.spec.grouped:
            return []
        source, first = self.source(tile, i), columns.start * LINE // 2 // GROUP
        return [ptx.from_bits(x) for x in ptx.load_if(source.exists, source.scales, 4 * first, 2)]

    def move(self, ring: Ring, state: PipelineState, ahead: Ahead, half: Half, following: Half) -> Ahead:
        """Convert and store the rows of a half, and load those of the following one. Registers hold the scales of one
        row ahead."""
        ring.wait_empty(state)
        target, loaded, scales = self.target(ring.address(state)), [], ahead.scales
        for i, first in enumerate(self.steps):
            next_row = (half[0], i + 1, half[1]) if i + 1 < len(self.steps) else (following[0], 0, following[1])
            for j, column in enumerate(half[1]):
                if j == 1:
                    next_scales = self.load_scales(*next_row)
                pairs = self.converted(ahead.words[i][j], column, scales)
                ptx.st_shared_v4(target, column * self.memory.column_bytes + first * LINE, pairs)
            ptx.sync_warp()  # keeps the loads behind the stores: ptxas would need registers for both
            loaded.append(self.load(following[0], i, following[1]))
            scales = next_scales
        tma.fence_async()
        tma.barrier_arrive(ring.full(state))
        return Ahead(loaded, scales)

    def converted(self, words: list[Int32], column: int, scales: list[Float32]) -> list[Int32]:
        """Return eight numbers of a column of lines in 16 bits. `scales`: of the groups of its half."""
        spec = self.memory.spec
        if column == ROTATED and spec.rope_bits == 16:
            return words
        pairs = self.converter.pairs(words, Int32(0))
        if column == ROTATED:
            return scaled(spec.dtype, pairs, self.rotated_factor)
        return scaled(spec.dtype, pairs, scales[column * LINE // 2 // GROUP % len(scales)]) if spec.grouped else pairs
