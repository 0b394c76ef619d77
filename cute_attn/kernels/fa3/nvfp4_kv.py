"""The Hopper kernel for 16-bit q over NVFP4 K and V: as over fp8, with block scales beside the staged rows.

fp16 operands are exact, since scales reach 448 and products have six significant bits down to 2^-10.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.attention_spec import OPERAND
from cute_attn.kernels.blocks.block_scaled_kv import BlockScaledParams, BlockScaledProducer
from cute_attn.kernels.blocks.dequant import Fp8
from cute_attn.kernels.blocks.kv_dequant import SWIZZLE_ROWS, DequantWarps
from cute_attn.kernels.blocks.smem import CHUNK
from cute_attn.kernels.blocks.transform_warps import WarpLane
from cute_attn.kernels.fa3.fp8_kv import Fp8KvProgram
from cute_attn.kernels.fa3.smem import Nvfp4KvMemory
from cute_attn.kernels.formats import LINE


class Nvfp4Warps(DequantWarps):
    """Transform warps that dequantize NVFP4 K and V."""

    memory: Nvfp4KvMemory
    clears_tail = False  # scales of 0 do

    @cute.jit
    def convert(self, place: WarpLane, operand: cutlass.Constexpr, source: Int32, target: Int32) -> None:
        """Dequantizes a tile. A lane converts chunks of 32 elements: half of a 128-byte line. Four lanes share a row of
        an even number of columns, two any other.

        Lanes of the second column write the halves of their chunk in swapped order, and odd rows take pairs of pieces
        in swapped order: 8 adjacent lanes then differ in bank.
        """
        columns, pitch, cols = self.memory.columns(operand), self.memory.pitch(operand), self.memory.tile.cols
        words_per_row, scales_offset = self.memory.scales(operand)
        lanes = 4 if columns % 2 == 0 else 2  # per row
        pieces, step = 2 * columns // lanes, 32 // lanes  # of a row; rows of a warp
        row, chunk = place.lane // lanes, place.lane % lanes
        swap = chunk >> 1
        read = source + row * pitch + chunk * CHUNK + swap * (CHUNK // 2)
        scales = source + scales_offset + row * (4 * words_per_row) + chunk * 2
        line = target + swap * (cols * LINE) + row * LINE
        write = line + (((chunk & 1) * 4 ^ row & (SWIZZLE_ROWS - 1) ^ swap * 2) * CHUNK)
        swapped = (row & 1) * (1 - pieces % 2)
        for i in cutlass.range(place.warp, cols // step, self.warps, unroll=1):
            for piece in cutlass.range_constexpr(pieces):
                moved = piece + swapped * (1 - 2 * (piece % 2)) if cutlass.const_expr(pieces > 1) else Int32(0)
                at = read + i * (step * pitch) + moved * (lanes * CHUNK)
                words = [*ptx.ld_shared_v2(at), *ptx.ld_shared_v2(at ^ Int32(CHUNK // 2))]
                scale = self.scale_pairs(scales + i * (step * 4 * words_per_row) + moved * (2 * lanes), swap)
                to = write + i * (step * LINE) + moved * (lanes // 2 * cols * LINE)
                for j in cutlass.range_constexpr(4):
                    pairs = ptx.e2m1x8_to_f16(words[j])
                    halves = [ptx.multiply_16(OPERAND, pair, scale[j // 2]) for pair in pairs]
                    ptx.st_shared_v4(to ^ Int32(j * CHUNK), 0, halves)

    def scale_pairs(self, address: Int32, swap: Int32) -> list[Int32]:
        """Returns the scales of both halves of a chunk, in the order in which it is converted, as equal fp16 pairs."""
        both = Fp8(OPERAND, "float8_e4m3fn", native=True).word(ptx.ld_shared_u16(address))[0]
        both = ptx.select(swap == 0, both, ptx.permute(both, both, 0x1032))
        return [ptx.permute(both, both, selector) for selector in (0x1010, 0x3232)]


class Nvfp4KvProgram(Fp8KvProgram):
    """Hopper kernel for 16-bit q over NVFP4 K and V."""

    params = BlockScaledParams
    memory: Nvfp4KvMemory
    transform_type = Nvfp4Warps
    producer_type = BlockScaledProducer
