"""Dequantization of fp8 K and V tiles, with contiguous rows as TMA writes them, to 16-bit operands of the tensor
cores: 128-byte lines of all rows, one column of 64 elements after the other, swizzled.

Converting fp8 to fp16 takes one instruction per pair, to bf16 four. So operands are fp16 whatever q is: P, which is
below 2^15; and bf16 q, its rows multiplied by powers of two that bring their largest number to 2^14. The loss in q is
below 2^-39 of that.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.attention_spec import OPERAND
from cute_attn.kernels.blocks.dequant import Fp8
from cute_attn.kernels.blocks.pipeline import SmemRings, start
from cute_attn.kernels.blocks.smem import CHUNK
from cute_attn.kernels.blocks.smem_map import StagedKvMemory
from cute_attn.kernels.blocks.transform_warps import OperandState, TransformWarps, WarpLane
from cute_attn.kernels.formats import LINE

TARGET_EXPONENT = 14  # of a row's largest number
MAX_EXPONENT = 100  # of a row's factor: reached by rows of zeros, or nearly so
SWIZZLE_ROWS = 8  # after which the swizzle repeats; a warp's four lanes per row read 64 elements


def normalize(places: Sequence[tuple[Int32, int]], of_row: Callable[[Int32], Int32]) -> Float32:
    """Converts a thread's part of a row of bf16 q to fp16, in place, times the power of two that brings the row's
    largest number to 2^TARGET_EXPONENT; returns the inverse. `places`: 16 bytes each; `of_row`: maximum over the
    threads of a row.
    """
    largest = Int32(0)
    for place in places:
        for word in ptx.ld_shared_v4(*place):
            for number in (word, word << 16):  # as fp32, with extra low bits
                largest = ptx.maximum(largest, number & Int32(0x7FFFFFFF))
    exponent = ptx.minimum(Int32(TARGET_EXPONENT + 127) - (of_row(largest) >> 23), Int32(MAX_EXPONENT))
    factor, inverse = (ptx.from_bits((127 + x) << 23) for x in (exponent, Int32(0) - exponent))
    for place in places:
        halves = (ptx.unpack_16("bfloat16", word) for word in ptx.ld_shared_v4(*place))
        ptx.st_shared_v4(*place, [ptx.pack_16(OPERAND, low * factor, high * factor) for low, high in halves])
    return inverse


class KvState(NamedTuple):
    """Pipeline states of both operands."""

    k: OperandState
    v: OperandState


class DequantWarps(TransformWarps):
    """Transform warps that dequantize fp8 K and V."""

    memory: StagedKvMemory
    groups = 1  # of eight rows, whose loads are in flight together

    @cute.jit
    def convert(self, place: WarpLane, operand: cutlass.Constexpr, source: Int32, target: Int32) -> None:
        """Dequantizes a tile, eight rows at a time. Odd rows take an even number of columns in swapped order: 8
        adjacent lanes then differ in bank, for reads and writes.
        """
        memory, cols, converter = self.memory, self.memory.tile.cols, Fp8(OPERAND, self.spec.kv_dtype, native=True)
        columns, pitch = memory.columns(operand), memory.pitch(operand)
        row, quarter = place.lane >> 2, place.lane & 3
        read, write = source + row * pitch + quarter * CHUNK, target + row * LINE + ((2 * quarter) ^ row) * CHUNK
        swapped = (row & 1) * (1 - columns % 2)
        reads = [read + swapped * (sign * pitch // columns) for sign in (1, -1)]
        writes = [write + swapped * (sign * cols * LINE) for sign in (1, -1)]
        pieces = [(g * SWIZZLE_ROWS * self.warps, c) for g in range(self.groups) for c in range(columns)]
        for i in cutlass.range(place.warp, cols // SWIZZLE_ROWS, self.groups * self.warps, unroll=1):
            words = [
                ptx.ld_shared_v4(reads[c % 2] + i * (SWIZZLE_ROWS * pitch), first * pitch + c * pitch // columns)
                for first, c in pieces
            ]
            for piece in cutlass.range_constexpr(len(pieces)):
                first, c = pieces[piece]
                pairs = [pair for word in words[piece] for pair in converter.word(word)]
                at, offset = writes[c % 2] + i * (SWIZZLE_ROWS * LINE), first * LINE + c * cols * LINE
                ptx.st_shared_v4(at, offset, pairs[:4])
                ptx.st_shared_v4(at ^ Int32(CHUNK), offset, pairs[4:])

    @cute.jit
    def clear(self, place: WarpLane, operand: cutlass.Constexpr, source: Int32, first: Int32) -> None:
        """Zeroes keys from `first`: each warp those that it will read itself."""
        chunks = self.memory.pitch(operand) // CHUNK
        for i in cutlass.range(place.warp, self.memory.tile.cols // SWIZZLE_ROWS, self.warps, unroll=1):
            for j in cutlass.range_constexpr(SWIZZLE_ROWS * chunks // 32):
                chunk = i * (SWIZZLE_ROWS * chunks) + 32 * j + place.lane
                if chunk >= first * chunks:
                    ptx.st_shared_v4(source + chunk * CHUNK, 0, [Int32(0) for _ in range(4)])
        ptx.sync_warp()

    def initial_state(self) -> KvState:
        return KvState(OperandState(start(), start()), OperandState(start(), start()))

    @cute.jit
    def transform_query(
        self, rings: SmemRings, place: WarpLane, at: KvState, order: cutlass.Constexpr, valid: Int32
    ) -> Any:
        """Dequantizes K one tile ahead of V, in the order in which the products need them."""
        k, v, total, cols = at.k, at.v, order.total, self.spec.tile.cols
        if total > 0:
            k = self.make_operand(rings, place, "k", k)
            for step in cutlass.range(1, total, unroll=1):
                k = self.make_operand(rings, place, "k", k)
                of_step = ptx.select(step == 1, valid, Int32(cols))
                v = self.make_operand(rings, place, "v", v, lambda valid=of_step: (valid < cols, valid))
            of_last = ptx.select(total == 1, valid, Int32(cols))
            v = self.make_operand(rings, place, "v", v, lambda: (of_last < cols, of_last))
        return KvState(k, v)
