"""The Hopper kernel for 16-bit q over fp8 K and V: transform warps dequantize every tile, the MMA warpgroups use 16-bit
operands.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant import Fp8
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, start
from cute_attn.kernels.blocks.scalars import device_scale
from cute_attn.kernels.blocks.scores import RowScales
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.kernel import Fa3Params, Maps
from cute_attn.kernels.fa3.parts.dequant import (
    MIN_SCALE,
    OPERAND,
    Fp8KvDequant,
    QNormalization,
    RegisterQTile,
    StoredRows,
)
from cute_attn.kernels.fa3.parts.gathered_kv import GatheredFp8KV
from cute_attn.kernels.fa3.parts.rings import SmemRings
from cute_attn.kernels.fa3.parts.tma_kv import TmaOperand
from cute_attn.kernels.fa3.parts.wgmma import AnyLanes, WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.fa3.smem import Fp8KvMemory
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.fa3.transform_warps import TransformWarpsProgram


class OperandState(NamedTuple):
    """Pipeline states of a K or V tile: in the ring of staged tiles, and in that of the operands made from them."""

    staged: PipelineState
    operand: PipelineState


class KvState(NamedTuple):
    """Pipeline states of both operands."""

    k: OperandState
    v: OperandState


@dataclass(frozen=True)
class Fp8KvRings(SmemRings):
    """Rings of operands, and those of fp8 tiles as stored."""

    k_staging: Ring
    v_staging: Ring

    @property
    def staged_k(self) -> Ring:
        return self.k_staging

    @property
    def staged_v(self) -> Ring:
        return self.v_staging


class Fp8KvProgram(TransformWarpsProgram):
    """Hopper kernel for 16-bit q over fp8 K and V."""

    memory: Fp8KvMemory
    gathered = GatheredFp8KV

    def __init__(self, spec: Fa3Spec, arch: str) -> None:
        super().__init__(spec, arch)
        self.producer_warps = 1

    def warpgroup_tile(self) -> WarpgroupTile:
        return (RegisterQTile if self.spec.tile.q_registers else WarpgroupTile)(OPERAND, self.memory)

    def rings(self, base: Int32) -> Fp8KvRings:
        memory, common, staged = self.memory, super().rings(base), self.spec.tile.staged
        barriers = base + Int32(memory.barriers + 8 * (memory.num_barriers - 4 * staged))
        k_bytes, v_bytes = (self.spec.tile.cols * pitch for pitch in (memory.staged_k_pitch, memory.staged_v_pitch))
        k_ring, v_ring = base + Int32(memory.staged_k_ring), base + Int32(memory.staged_v_ring)
        writers = 32 if self.gathers else 1  # every lane, or TMA
        return Fp8KvRings(
            common.q,
            dataclasses.replace(common.k, writers=self.transform_warps),
            dataclasses.replace(common.v, writers=self.transform_warps),
            common.records,
            Ring(staged, k_bytes, k_ring, barriers, writers),
            Ring(staged, v_bytes, v_ring, barriers + Int32(16 * staged), writers),
        )

    def tma_operands(self, maps: Maps) -> tuple[TmaOperand, TmaOperand]:
        """Returns TMA operands of whole rows: one column."""
        k, v = self.memory.staged_k_pitch, self.memory.staged_v_pitch
        return TmaOperand(maps.k, 1, k, k), TmaOperand(maps.v, 1, v, v)

    # --- q ----------------------------------------------------------------------------------------------------------

    def prepare_q(
        self, p: Fa3Params, work: QueryTile, lanes: WarpgroupLanes, q_rows: Int32, scale: Float32
    ) -> list[Float32]:
        """Returns a scale per row, after normalizing bf16 rows to fp16."""
        if self.spec.dtype == OPERAND:
            return [scale, scale]
        # Computed for every query tile: no register is free to hold it in between.
        scale = p.scale * device_scale(p.scale0) * device_scale(p.scale1)
        return QNormalization(self.memory, lanes).run(q_rows, scale)

    def softmax(self, p: Fa3Params, work: QueryTile, lanes: WarpgroupLanes, scale: Any) -> OnlineSoftmax:
        if self.spec.scores:
            return super().softmax(p, work, lanes, scale)
        return OnlineSoftmax(self.tile.scores_layout, [ptx.fmax(x, Float32(MIN_SCALE)) for x in scale])

    def scale_step(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes, scale: Any) -> RowScales:
        return RowScales(self.tile.scores_layout, lambda: scale)

    # --- transform warps ---------------------------------------------------------------------------------------------

    def transform(self, warp: Int32, lane: Int32) -> Fp8KvDequant:
        memory, stored = self.memory, self.spec.kv_dtype
        k = StoredRows(memory.qk_columns, memory.staged_k_pitch, Fp8(OPERAND, stored, native=True))
        v = StoredRows(memory.vo_columns, memory.staged_v_pitch, Fp8(OPERAND, stored, native=True))
        return Fp8KvDequant(memory, warp, lane, self.transform_warps, k, v)

    def initial_state(self) -> KvState:
        return KvState(OperandState(start(), start()), OperandState(start(), start()))

    @cute.jit
    def transform_tiles(
        self, rings: SmemRings, transform: cutlass.Constexpr, at: KvState, total: Int32, valid: Int32
    ) -> Any:
        """Dequantizes K one tile ahead of V, in the order in which the MMA warpgroups need them."""
        k, v = at.k, at.v
        if total > 0:
            k = self.dequantize_k(rings, transform, k)
            for step in cutlass.range(1, total, unroll=1):
                k = self.dequantize_k(rings, transform, k)
                v = self.dequantize_v(rings, transform, v, ptx.select(step == 1, valid, Int32(self.spec.tile.cols)))
            v = self.dequantize_v(rings, transform, v, ptx.select(total == 1, valid, Int32(self.spec.tile.cols)))
        return KvState(k, v)

    def dequantize_k(self, rings: SmemRings, transform: Fp8KvDequant, at: OperandState) -> OperandState:
        staged, ring = rings.staged_k, rings.k
        staged.wait_full(at.staged)
        ring.wait_empty(at.operand)
        transform.run(transform.k, staged.address(at.staged), ring.address(at.operand))
        self.publish_operand([staged.empty(at.staged), ring.full(at.operand)], transform.lane)
        return OperandState(staged.next(at.staged), ring.next(at.operand))

    @cute.jit
    def dequantize_v(self, rings: SmemRings, transform: cutlass.Constexpr, at: OperandState, valid: Int32) -> Any:
        staged, ring = rings.staged_v, rings.v
        staged.wait_full(at.staged)
        if cutlass.const_expr(self.spec.schedule == "items" and not self.gathers):  # noqa: SIM102
            if valid < self.spec.tile.cols:
                transform.clear(transform.v, staged.address(at.staged), valid)
        ring.wait_empty(at.operand)
        transform.run(transform.v, staged.address(at.staged), ring.address(at.operand))
        self.publish_operand([staged.empty(at.staged), ring.full(at.operand)], transform.lane)
        return OperandState(staged.next(at.staged), ring.next(at.operand))
