"""Transform warps that dequantize fp8 K and V under 16-bit q."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant import Fp8
from cute_attn.kernels.blocks.kv_dequant import OPERAND, Fp8KvDequant, Fp8Rows, KvDequant
from cute_attn.kernels.blocks.pipeline import PipelineState, SmemRings, start
from cute_attn.kernels.blocks.smem_map import StagedKvMemory
from cute_attn.kernels.blocks.transform_warps import TransformWarps


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

    memory: StagedKvMemory
    groups = 1

    @property
    def clears_tail(self) -> bool:
        """Whether rows past the end hold another request's values, or anything."""
        return self.spec.schedule == "items" and self.spec.kv != "gathered"

    def transform(self, warp: Int32, lane: Int32) -> KvDequant:
        memory, stored = self.memory, self.spec.kv_dtype
        k = Fp8Rows(memory.qk_columns, memory.staged_k_pitch, Fp8(OPERAND, stored, native=True))
        v = Fp8Rows(memory.vo_columns, memory.staged_v_pitch, Fp8(OPERAND, stored, native=True))
        return Fp8KvDequant(memory.tile.cols, warp, lane, self.warps, k, v, self.groups)

    def initial_state(self) -> KvState:
        return KvState(OperandState(start(), start()), OperandState(start(), start()))

    @cute.jit
    def transform_tiles(
        self, rings: SmemRings, transform: cutlass.Constexpr, at: KvState, total: Int32, valid: Int32
    ) -> Any:
        """Dequantizes K one tile ahead of V, in the order in which the products need them."""
        k, v = at.k, at.v
        if total > 0:
            k = self.dequantize_k(rings, transform, k)
            for step in cutlass.range(1, total, unroll=1):
                k = self.dequantize_k(rings, transform, k)
                v = self.dequantize_v(rings, transform, v, ptx.select(step == 1, valid, Int32(self.spec.tile.cols)))
            v = self.dequantize_v(rings, transform, v, ptx.select(total == 1, valid, Int32(self.spec.tile.cols)))
        return KvState(k, v)

    def dequantize_k(self, rings: SmemRings, transform: KvDequant, at: OperandState) -> OperandState:
        return self.dequantize(rings.staged_k, rings.k, transform, transform.k, at, None)

    def dequantize_v(self, rings: SmemRings, transform: KvDequant, at: OperandState, valid: Int32) -> OperandState:
        return self.dequantize(rings.staged_v, rings.v, transform, transform.v, at, valid)

    @cute.jit
    def dequantize(
        self,
        staged: cutlass.Constexpr,
        ring: cutlass.Constexpr,
        transform: cutlass.Constexpr,
        rows: cutlass.Constexpr,
        at: OperandState,
        valid: Any,
    ) -> Any:
        """Dequantizes a tile. `valid`: its keys, where those behind them may have to be cleared."""
        staged.wait_full(at.staged)
        if cutlass.const_expr(self.clears_tail and valid is not None):  # noqa: SIM102
            if valid < self.spec.tile.cols:
                transform.clear(rows, staged.address(at.staged), valid)
        ring.wait_empty(at.operand)
        transform.run(rows, staged.address(at.staged), ring.address(at.operand))
        self.publish_operand([staged.empty(at.staged), ring.full(at.operand)], transform.lane)
        return OperandState(staged.next(at.staged), ring.next(at.operand))
