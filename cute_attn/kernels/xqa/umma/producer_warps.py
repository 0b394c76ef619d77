"""Producer warps: K and V of a segment by token, with cp.async; before them Q, where it has the dtype of K and V.

The copies themselves arrive at the full barriers. They write through the generic proxy, and the products read through
the async proxy: the MMA warp fences between its wait and its products.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, WarpRole, start
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.pages import TokenPages, page_id, token_pages
from cute_attn.kernels.xqa.parts.partition import Partition, Segment
from cute_attn.kernels.xqa.umma.smem import UmmaMemory
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec

WARPS = 2  # with the others no more than eight, which leaves 255 registers for a thread


def row_lanes(spec: XqaUmmaSpec) -> int:
    """Returns how many lanes copy a row of a slot as the products read it, columns of lines of all rows, swizzled: a
    lane copies a chunk of each line.
    """
    return spec.line // CHUNK


@dataclass(frozen=True)
class TokenRows:
    """K and V of one request and kv head by token, of which each warp copies 64 of a tile. Tokens outside [first_token,
    kv_len) are not read but zero-filled: a NaN there would survive 0 * V.
    """

    spec: XqaUmmaSpec
    p: Any  # XqaParams
    segment: Segment
    table: Int64  # page ids of the request
    head: Int32
    thread: Int32  # of the producer warps

    @property
    def warp_rows(self) -> int:
        return self.spec.cols // WARPS

    def pages(self, tile: Int32, wanted: Boolean) -> TokenPages:
        """Reads the page ids of this lane's tokens, l and l + 32 of the warp's; an unwanted tile reads nothing."""
        request, lane, rows = self.segment.request, self.thread & 31, range(0, self.warp_rows, 32)
        tokens = (tile * self.spec.cols + (self.thread >> 5) * self.warp_rows + lane + i for i in rows)

        def exists(token: Int32) -> Boolean:
            readable = isa.less_unsigned(token - request.first_token, request.kv_len - request.first_token)
            return isa.all_of([wanted, readable])

        return token_pages(self.p, tokens, exists, partial(page_id, self.table))

    def copy(self, operand: str, piece: int, tile: Int32, pages: TokenPages, slot: Int32) -> None:
        """Copies the warp's rows of a piece of K or V to a slot."""
        p, request, lane, spec = self.p, self.segment.request, self.thread & 31, self.spec
        lanes, piece_bytes = row_lanes(spec), spec.piece_dim * spec.item_bytes
        rows = 32 // lanes  # that the warp copies at once
        head_stride, page_stride, stride = (getattr(p, f"{operand}_stride_{name}") for name in ("h", "page", "n"))
        row, chunk = lane // lanes, lane % lanes
        first = (self.thread >> 5) * self.warp_rows + row
        start = getattr(p, operand) + Int64(self.head) * head_stride + Int64(chunk * CHUNK)
        places = [page * page_stride + offset * stride for page, offset in zip(pages.pages, pages.offsets, strict=True)]
        token = tile * self.spec.cols + first - request.first_token
        length = request.kv_len - request.first_token
        target = slot + swizzled(first, chunk, spec.line)
        for i in range(0, self.warp_rows, rows):
            source = isa.mad_wide(ptx.shuffle_from(places[i // 32], row + i % 32), Int32(CHUNK), start)
            size = ptx.select(isa.less_unsigned(token + i, length), Int32(CHUNK), Int32(0))
            shared = target ^ Int32(rows * CHUNK) if i % 8 else target  # the swizzle repeats after eight rows
            for within in range(0, piece_bytes, spec.line):
                ptx.cp_async(shared, within * spec.cols + i * spec.line, source, piece * piece_bytes + within, size)


class ProducerWarps:
    """Role of the producer warps."""

    def __init__(self, spec: XqaUmmaSpec, memory: UmmaMemory) -> None:
        self.spec, self.memory = spec, memory
        filled = ("kv", "q") if spec.q_terms == 1 else ("kv",)
        self.role = WarpRole("producer", WARPS, fills=dict.fromkeys(filled, 32 * WARPS))

    @cute.jit
    def run(self, p: Any, shared: cutlass.Constexpr, thread: Int32) -> None:
        """Loads Q, K and V of all segments of the CTA."""
        partition = Partition(p, self.spec)
        share, segment = partition.first_segment()
        q, kv = start(), start()
        while partition.overlaps(segment, share):
            split = partition.split(segment, share)
            if split.begin < split.end:
                if cutlass.const_expr("q" in self.role.fills):
                    q = self.load_queries(p, shared.by_name["q"], q, partition.rows(segment), thread)
                table = isa.mad_wide(segment.first_page, Int32(4), p.table)
                rows = TokenRows(self.spec, p, segment, table, partition.head(segment.unit), thread)
                first = split.begin + segment.request.first_token // self.spec.cols
                kv = self.load_split(rows, shared.by_name["kv"], kv, first, split.tiles)
            segment = partition.next_segment(segment)

    @cute.jit
    def load_split(
        self, rows: cutlass.Constexpr, ring: cutlass.Constexpr, kv: PipelineState, first: Int32, count: Int32
    ) -> PipelineState:
        """Copies tiles from `first`: K of one, then K of the next and V of this one in turn."""
        pages, following = rows.pages(first, Boolean(True)), rows.pages(first + 1, count > 1)
        kv = self.load(rows, ring, kv, "k", first, pages)
        for i in cutlass.range(0, count, unroll=1):
            tile = first + i
            ahead = rows.pages(tile + 2, i + 2 < count)
            if i + 1 < count:
                kv = self.load(rows, ring, kv, "k", tile + 1, following)
            kv = self.load(rows, ring, kv, "v", tile, pages)
            pages, following = following, ahead
        return kv

    def load(
        self, rows: TokenRows, ring: Ring, kv: PipelineState, operand: str, tile: Int32, pages: TokenPages
    ) -> PipelineState:
        for piece in range(self.spec.pieces):
            ring.wait_empty(kv)
            rows.copy(operand, piece, tile, pages, ring.address(kv))
            ptx.cp_async_arrive(ring.full(kv))
            kv = ring.next(kv)
        return kv

    def load_queries(self, p: Any, ring: Ring, q: PipelineState, rows: PackedRows, thread: Int32) -> PipelineState:
        """Copies the rows of a segment; those that do not exist become zeros."""
        ring.wait_empty(q)
        lanes, line = row_lanes(self.spec), self.spec.line
        slot, chunk = ring.address(q), thread % lanes
        for first in range(0, self.spec.rows, 32 // lanes * WARPS):
            row = thread // lanes + first
            size = ptx.select(rows.exists(row), Int32(CHUNK), Int32(0))
            source = rows.address(p.q, row, p.q_stride_n, p.q_stride_h) + Int64(chunk * CHUNK)
            target = slot + swizzled(row, chunk, line)
            for within in range(0, self.spec.head_dim * self.spec.item_bytes, line):
                ptx.cp_async(target, within * self.spec.rows, source, within, size)
        ptx.cp_async_arrive(ring.full(q))
        return ring.next(q)
