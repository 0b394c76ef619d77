"""Warp that makes operands of 8 bits of Q: terms in e4m3 of its rows times a power of two.

One factor serves all rows of a segment. It brings their largest number to 224 .. 448, and no bit above 2^-18 of that is
lost.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.pipeline import PipelineState, WarpRole, start
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.xqa.parts.partition import Partition
from cute_attn.kernels.xqa.parts.softmax import log2_scale
from cute_attn.kernels.xqa.umma.operands import e4m3_terms
from cute_attn.kernels.xqa.umma.smem import UmmaMemory
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec

LANE_ITEMS = 8  # of q, 16 bytes, that a lane converts at once
LOADS = 4  # in flight
TARGET_EXPONENT = 8  # of the largest number
MAX_EXPONENT = 100  # of the factor: reached by rows of zeros, or nearly so
QUARTER = 1 << 21  # of a power of two in a float's fraction: from 1.75, where 448 would be exceeded, to the next one
INFINITY = 255 << 23


class QueryWarp:
    """Role of the warp that converts Q."""

    def __init__(self, spec: XqaUmmaSpec, memory: UmmaMemory) -> None:
        self.spec, self.memory = spec, memory
        self.role = WarpRole("query", 1, fills={"q": 1})

    @property
    def row_lanes(self) -> int:
        """Lanes of a row."""
        return self.spec.head_dim // LANE_ITEMS

    @property
    def passes(self) -> int:
        """Times that all lanes convert `LANE_ITEMS`."""
        return self.spec.rows * self.row_lanes // 32

    @cute.jit
    def run(self, p: Any, shared: cutlass.Constexpr) -> None:
        """Converts Q of all segments of the CTA."""
        partition = Partition(p, self.spec)
        share, segment = partition.first_segment()
        ring, q, scale = shared.by_name["q"], start(), log2_scale(p)
        lane = cute.arch.thread_idx()[0] & 31
        while partition.overlaps(segment, share):
            if partition.split(segment, share).tiles > 0:
                rows = partition.rows(segment)
                ring.wait_empty(q)
                factor, inverse = self.factors(p, rows, lane)
                self.convert(p, rows, ring.address(q), factor, lane)
                self.publish(shared, ring, q, scale * inverse, lane)
                q = ring.next(q)
            segment = partition.next_segment(segment)

    @cute.jit
    def factors(self, p: Any, rows: cutlass.Constexpr, lane: Int32) -> tuple[Float32, Float32]:
        """Returns the factor of Q and its inverse."""
        largest = Int32(0)
        for step in cutlass.range(0, self.passes, LOADS, unroll=1):
            for chunk in self.load(p, rows, step, lane):
                for x in chunk:
                    magnitude = ptx.bits(x) & Int32(0x7FFFFFFF)
                    # What is infinite or NaN must not become finite in other rows.
                    largest = ptx.maximum(largest, ptx.select(magnitude < Int32(INFINITY), magnitude, Int32(0)))
        largest = ptx.reduce_lanes(ptx.maximum, largest, (16, 8, 4, 2, 1))
        exponent = ptx.minimum(Int32(TARGET_EXPONENT + 127) - ((largest + Int32(QUARTER)) >> 23), Int32(MAX_EXPONENT))
        factor, inverse = (ptx.from_bits((127 + x) << 23) for x in (exponent, Int32(0) - exponent))
        return factor, inverse

    @cute.jit
    def convert(self, p: Any, rows: cutlass.Constexpr, slot: Int32, factor: Float32, lane: Int32) -> None:
        """Writes the terms of all rows, times `factor`."""
        item, line = lane % self.row_lanes * LANE_ITEMS, self.spec.line
        column = item // line * (self.memory.score_columns * line)
        place, half = item % line // CHUNK, item & LANE_ITEMS
        for step in cutlass.range(0, self.passes, LOADS, unroll=1):
            for i, chunk in enumerate(self.load(p, rows, step, lane)):
                # Infinite numbers become NaN, as their scores would: x - x is 0 for all others.
                values = [ptx.fma(x, factor, x - x) for x in chunk]
                parts = zip(*(e4m3_terms(values[j : j + 4], self.spec.q_terms) for j in (0, 4)), strict=True)
                at = slot + column + swizzled(self.row(step + i, lane), place, line) + half
                for term, words in enumerate(parts):
                    ptx.st_shared_v2(at, term * self.spec.rows * line, words)

    def row(self, step: Int32, lane: Int32) -> Int32:
        return step * (32 // self.row_lanes) + lane // self.row_lanes

    def load(self, p: Any, rows: PackedRows, first: Int32, lane: Int32) -> list[list[Float32]]:
        """Loads this lane's numbers of `LOADS` passes; rows that do not exist are zeros."""
        offset, chunks = lane % self.row_lanes * CHUNK, []
        for i in range(LOADS):
            row = self.row(first + i, lane)
            address = rows.address(p.q, row, p.q_stride_n, p.q_stride_h) + offset.to(cutlass.Int64)
            chunks.append(ptx.load_if(rows.exists(row), address, 0, 4))
        return [ptx.unpack_pairs(self.spec.dtype, words) for words in chunks]

    @cute.jit
    def publish(
        self, shared: cutlass.Constexpr, ring: cutlass.Constexpr, q: PipelineState, scale: Float32, lane: Int32
    ) -> None:
        """Hands Q on, with the factor from products to base-2 exponents."""
        tma.fence_async()
        if lane == 0:
            ptx.st_shared_f32(shared.scratch["q_scales"] + ring.slot(q) * 4, 0, scale)
        ptx.sync_warp()
        ring.fill(q, lane)
