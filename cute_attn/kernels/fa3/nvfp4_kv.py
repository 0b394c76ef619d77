"""The Hopper kernel for 16-bit q over NVFP4 K and V: as over fp8, with block scales beside the staged rows."""

from cutlass import Int32

from cute_attn.kernels.blocks.block_scaled_kv import BlockScaledParams, BlockScaledProducer
from cute_attn.kernels.blocks.dequant_warps import DequantWarps
from cute_attn.kernels.fa3.fp8_kv import Fp8KvProgram
from cute_attn.kernels.fa3.parts.nvfp4 import Nvfp4KvDequant, Nvfp4Rows
from cute_attn.kernels.fa3.smem import Nvfp4KvMemory


class Nvfp4Warps(DequantWarps):
    """Transform warps that dequantize NVFP4 K and V."""

    memory: Nvfp4KvMemory
    clears_tail = False  # scales of 0 do

    def transform(self, warp: Int32, lane: Int32) -> Nvfp4KvDequant:
        memory = self.memory
        k = Nvfp4Rows(memory.qk_columns, memory.staged_k_pitch, memory.k_scales)
        v = Nvfp4Rows(memory.vo_columns, memory.staged_v_pitch, memory.v_scales)
        return Nvfp4KvDequant(memory.tile.cols, warp, lane, self.warps, k, v)


class Nvfp4KvProgram(Fp8KvProgram):
    """Hopper kernel for 16-bit q over NVFP4 K and V."""

    params = BlockScaledParams
    memory: Nvfp4KvMemory
    transform_type = Nvfp4Warps
    producer_type = BlockScaledProducer
