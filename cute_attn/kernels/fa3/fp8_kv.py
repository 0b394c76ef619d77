"""The Hopper kernel for 16-bit q over fp8 K and V: transform warps dequantize every tile, the MMA warpgroups use 16-bit
operands.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant import Fp8
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, SmemRings, start
from cute_attn.kernels.blocks.scalars import device_scale
from cute_attn.kernels.blocks.scores import RowScales
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.kernel import Fa3Program
from cute_attn.kernels.fa3.parts.dequant import (
    MIN_SCALE,
    OPERAND,
    Fp8KvDequant,
    QNormalization,
    RegisterQTile,
    StoredRows,
)
from cute_attn.kernels.fa3.parts.wgmma import AnyLanes, WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.fa3.smem import Fp8KvMemory
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.fa3.transform_warps import TransformWarps


class OperandState(NamedTuple):
    """Pipeline states of a K or V tile: in the ring of staged tiles, and in that of the operands made from them."""

    staged: PipelineState
    operand: PipelineState


class KvState(NamedTuple):
    """Pipeline states of both operands."""

    k: OperandState
    v: OperandState


class DequantWarps(TransformWarps):
    """Transform warps that dequantize K and V."""

    memory: Fp8KvMemory

    def transform(self, warp: Int32, lane: Int32) -> Fp8KvDequant:
        memory, stored = self.memory, self.spec.kv_dtype
        k = StoredRows(memory.qk_columns, memory.staged_k_pitch, Fp8(OPERAND, stored, native=True))
        v = StoredRows(memory.vo_columns, memory.staged_v_pitch, Fp8(OPERAND, stored, native=True))
        return Fp8KvDequant(memory, warp, lane, self.warps, k, v)

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
        if cutlass.const_expr(self.spec.schedule == "items" and self.spec.kv != "gathered"):  # noqa: SIM102
            if valid < self.spec.tile.cols:
                transform.clear(transform.v, staged.address(at.staged), valid)
        ring.wait_empty(at.operand)
        transform.run(transform.v, staged.address(at.staged), ring.address(at.operand))
        self.publish_operand([staged.empty(at.staged), ring.full(at.operand)], transform.lane)
        return OperandState(staged.next(at.staged), ring.next(at.operand))


class Fp8KvProgram(Fa3Program):
    """Hopper kernel for 16-bit q over fp8 K and V."""

    memory: Fp8KvMemory
    transform_type = DequantWarps

    def warpgroup_tile(self, spec: Fa3Spec, memory: Fp8KvMemory) -> WarpgroupTile:
        return (RegisterQTile if spec.tile.q_registers else WarpgroupTile)(OPERAND, memory)

    def prepare_q(
        self, p: PersistentParams, work: QueryTile, lanes: WarpgroupLanes, q_rows: Int32, scale: Float32
    ) -> list[Float32]:
        """Returns a scale per row, after normalizing bf16 rows to fp16."""
        if self.spec.dtype == OPERAND:
            return [scale, scale]
        # Computed for every query tile: no register is free to hold it in between.
        scale = p.scale * device_scale(p.scale0) * device_scale(p.scale1)
        return QNormalization(self.memory, lanes).run(q_rows, scale)

    def softmax(self, p: PersistentParams, work: QueryTile, lanes: WarpgroupLanes, scale: Any) -> OnlineSoftmax:
        if self.spec.scores:
            return super().softmax(p, work, lanes, scale)
        return OnlineSoftmax(self.tile.scores_layout, [ptx.fmax(x, Float32(MIN_SCALE)) for x in scale])

    def scale_step(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes, scale: Any) -> RowScales:
        return RowScales(self.tile.scores_layout, lambda: scale)
