"""Dequantization of fp8 K and V tiles, with contiguous rows as TMA writes them, to the 16-bit operands of wgmma:
128-byte lines of all rows, one column of 64 elements after the other, swizzled.

Converting fp8 to fp16 takes one instruction per pair, to bf16 four. So operands are fp16 whatever q is: P, which is
below 2^14; and bf16 q, its rows multiplied by powers of two that bring their largest number to 2^14. The loss in q is
below 2^-39 of that.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90, tma
from cute_attn.kernels.blocks.dequant import Fp8
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.fa3.parts.wgmma import WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.fa3.smem import Fp8KvMemory
from cute_attn.kernels.formats import LINE

OPERAND = "float16"
TARGET_EXPONENT = 14  # of a row's largest number
MAX_EXPONENT = 100  # of a row's factor: reached by rows of zeros, or nearly so
MIN_SCALE = 1e-30  # of scores: 0 would turn hidden ones into NaN
SWIZZLE_ROWS = 8  # after which the swizzle repeats; a warp's four lanes per row read 64 elements


@dataclass(frozen=True)
class RegisterQTile(WarpgroupTile):
    """Tile whose q is held in registers."""

    def q_operand(self, address: Int32) -> list[Int32]:
        lanes, q = WarpgroupLanes.of(), []
        row, half = lanes.warp * 16 + lanes.lane % 16, lanes.lane // 16
        for step in range(self.memory.head_dim_qk // 16):
            at = address + swizzled(row, half + step % 4 * 2, LINE)
            q += ptx.ldmatrix_x4(at, step // 4 * self.memory.tile.rows * LINE)
        return q

    def rematerialize(self, q: list[Int32]) -> list[Int32]:
        return q

    def scores(self, q: list[Int32], k: Int32) -> list[Float32]:
        cols = self.memory.tile.cols
        steps = [step // 4 * cols * LINE + step % 4 * 32 for step in range(self.memory.head_dim_qk // 16)]
        return sm90.wgmma_from_registers(self.dtype, self.dtype, cols, q, k, steps, k_major=True)


@dataclass(frozen=True)
class QNormalization:
    """Normalization of a warp's 16 rows of q in shared memory, from bf16 to fp16, with two lanes per row."""

    memory: Fp8KvMemory
    lanes: WarpgroupLanes

    def run(self, q_rows: Int32, scale: Float32) -> list[Float32]:
        """Converts the rows; returns the factors for the scores of this lane's rows."""
        lane = self.lanes.lane
        at = q_rows + (self.lanes.warp * 16 + lane // 2) * LINE + lane % 2 * (LINE // 2)
        pitch = self.memory.tile.rows * LINE
        offsets = [column * pitch + 16 * i for column in range(self.memory.qk_columns) for i in range(4)]
        largest = Int32(0)
        for offset in offsets:
            for word in ptx.ld_shared_v4(at, offset):
                for number in (word, word << 16):  # as fp32, possibly with extra low bits
                    largest = ptx.maximum(largest, number & Int32(0x7FFFFFFF))
        largest = ptx.maximum(largest, ptx.shuffle_xor_b32(largest, 1))
        exponent = ptx.minimum(Int32(TARGET_EXPONENT + 127) - (largest >> 23), Int32(MAX_EXPONENT))
        factor, inverse = (ptx.from_bits((127 + x) << 23) for x in (exponent, Int32(0) - exponent))
        for offset in offsets:
            words = []
            for word in ptx.ld_shared_v4(at, offset):
                low, high = ptx.unpack_16("bfloat16", word)
                words.append(ptx.pack_16(OPERAND, low * factor, high * factor))
            ptx.st_shared_v4(at, offset, words)
        tma.fence_async()
        ptx.sync_warp()
        layout = MmaFragmentLayout(1, 1)  # of scores; lanes 2 r and 2 r + 1 have normalized row r
        return [
            ptx.shuffle_from(scale * inverse, layout.lane_row(lane) * 2 + 2 * layout.row(slot)) for slot in layout.slots
        ]


@dataclass(frozen=True)
class StoredRows:
    """Stored rows of K or V, and their converter."""

    columns: int
    pitch: int
    converter: Fp8


@dataclass(frozen=True)
class Fp8KvDequant:
    """Dequantization of staged tiles by the transform warps."""

    memory: Fp8KvMemory
    warp: Int32
    lane: Int32
    warps: int
    k: StoredRows
    v: StoredRows

    @cute.jit
    def run(self, rows: cutlass.Constexpr, source: Int32, target: Int32) -> None:
        """Dequantizes a tile, eight rows at a time. Odd rows take an even number of columns in swapped order: 8
        adjacent lanes then differ in bank, for reads and writes.
        """
        cols, columns, pitch = self.memory.tile.cols, rows.columns, rows.pitch
        row, quarter = self.lane >> 2, self.lane & 3
        read, write = source + row * pitch + quarter * CHUNK, target + row * LINE + ((2 * quarter) ^ row) * CHUNK
        swapped = (row & 1) * (1 - columns % 2)
        reads = [read + swapped * (sign * pitch // columns) for sign in (1, -1)]
        writes = [write + swapped * (sign * cols * LINE) for sign in (1, -1)]
        for i in cutlass.range(self.warp, cols // SWIZZLE_ROWS, self.warps, unroll=1):
            words = [
                ptx.ld_shared_v4(reads[c % 2] + i * (SWIZZLE_ROWS * pitch), c * pitch // columns)
                for c in range(columns)
            ]
            for c in cutlass.range_constexpr(columns):
                pairs = [pair for word in words[c] for pair in rows.converter.word(word)]
                at = writes[c % 2] + i * (SWIZZLE_ROWS * LINE)
                ptx.st_shared_v4(at, c * cols * LINE, pairs[:4])
                ptx.st_shared_v4(at ^ Int32(CHUNK), c * cols * LINE, pairs[4:])

    @cute.jit
    def clear(self, rows: cutlass.Constexpr, source: Int32, first: Int32) -> None:
        """Zeroes keys from `first`: they belong to another request or to none, and 0 * NaN is not 0. Each warp clears
        the rows that it will read itself.
        """
        chunks = rows.pitch // CHUNK
        for i in cutlass.range(self.warp, self.memory.tile.cols // SWIZZLE_ROWS, self.warps, unroll=1):
            for j in cutlass.range_constexpr(SWIZZLE_ROWS * chunks // 32):
                chunk = i * (SWIZZLE_ROWS * chunks) + 32 * j + self.lane
                if chunk >= first * chunks:
                    ptx.st_shared_v4(source + chunk * CHUNK, 0, [Int32(0) for _ in range(4)])
        ptx.sync_warp()
