"""Blackwell kernel for 16-bit q over fp8 K and V: transform warps dequantize every tile, products use fp16 operands.

producer            K0 Q V0 K1 V1 ...                      into the rings of staged tiles
softmax warps          q                                   rows of bf16 q to fp16, once per work item
transform warps        K0' K1' V0' K2' V1' ...
MMA warp                   S0 S1 | O0 += P0 V0', S0' | ...
"""

from dataclasses import replace
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.kv_dequant import DequantWarps, normalize
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, SmemRings, WarpRole
from cute_attn.kernels.blocks.smem import CHUNK
from cute_attn.kernels.fa4.kernel import Fa4Program
from cute_attn.kernels.fa4.parts.umma import RowLanes, UmmaTile
from cute_attn.kernels.fa4.smem import Fp8KvMemory
from cute_attn.kernels.fa4.softmax_warps import WARPS, SoftmaxWarps
from cute_attn.kernels.formats import LINE


class NormalizingSoftmax(SoftmaxWarps):
    """Softmax warps that convert their rows of bf16 q before the first product."""

    tile: UmmaTile

    def role(self, i: int) -> WarpRole:
        role = super().role(i)
        return replace(role, fills={**role.fills, "normalized": WARPS}) if self.spec.normalizes_q else role

    def prepare_q(self, rings: SmemRings, q: PipelineState, lanes: RowLanes, scale: Float32) -> Float32:
        if self.spec.normalizes_q:
            ring = rings.by_name["normalized"]
            scale = scale * self.normalize(rings.q.address(q), lanes.row(0))
            tma.fence_async()
            ptx.sync_warp()
            ring.fill(q, lanes.lane)
        return scale

    def normalize(self, q: Int32, row: Int32) -> Float32:
        """Normalizes a row of q in its slot; returns the factor for the row's scores. Threads start at different chunks
        of their lines, so that eight adjacent ones differ in bank.
        """
        memory = self.tile.memory
        at = (q + row * LINE) | ((row & 7) * CHUNK)
        chunks = [at ^ Int32(i * CHUNK) for i in range(LINE // CHUNK)]
        columns = [column * memory.tile.rows * LINE for column in range(memory.qk_columns)]
        return normalize([(chunk, column) for column in columns for chunk in chunks], lambda x: x)


class SpareWarps(DequantWarps):
    """Two transform warps, which have registers for more loads in flight than four or eight would."""

    groups = 2


class Fp8KvProgram(Fa4Program):
    """Blackwell kernel for 16-bit q over fp8 K and V."""

    memory: Fp8KvMemory
    softmax_warps_type: ClassVar = NormalizingSoftmax
    transform_type = SpareWarps

    def run_spare_warp(self, params: PersistentParams, rings: SmemRings, warp: Int32) -> None:
        self.transform.run(params, rings, cute.arch.thread_idx()[0] - 32)
