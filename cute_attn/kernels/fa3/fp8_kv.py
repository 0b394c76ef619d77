"""The Hopper kernel for q of 16 bits over K and V of 8: helpers widen every tile, math groups know nothing of it."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant import Fp8
from cute_attn.kernels.blocks.pipeline import Place, Ring, start
from cute_attn.kernels.blocks.scalars import device_scale
from cute_attn.kernels.blocks.scores import RowScales
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.kernel import Fa3Params, Maps
from cute_attn.kernels.fa3.parts.dequant import (
    LEAST_SCALE,
    OPERAND,
    Normalisation,
    RegisterTile,
    Rows,
    RowSoftmax,
    Widening,
)
from cute_attn.kernels.fa3.parts.gathered_kv import NarrowPages
from cute_attn.kernels.fa3.parts.rings import Shared
from cute_attn.kernels.fa3.parts.tma_kv import Boxes
from cute_attn.kernels.fa3.parts.wgmma import AnyLanes, GroupLanes, GroupTile
from cute_attn.kernels.fa3.smem import WidenedMemory
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.fa3.transform_warps import HelpedProgram


class Pair(NamedTuple):
    """Places of a tile of K or V: where it arrives, and of the operand that is made of it."""

    arriving: Place
    operand: Place


class Places(NamedTuple):
    k: Pair
    v: Pair


@dataclass(frozen=True)
class WidenedShared(Shared):
    stored_k: Ring
    stored_v: Ring

    @property
    def arriving_k(self) -> Ring:
        return self.stored_k

    @property
    def arriving_v(self) -> Ring:
        return self.stored_v


class WidenedProgram(HelpedProgram):
    memory: WidenedMemory
    gathered = NarrowPages

    def __init__(self, spec: Fa3Spec, arch: str) -> None:
        super().__init__(spec, arch)
        self.producers = 1

    def group_tile(self) -> GroupTile:
        return (RegisterTile if self.spec.tile.q_registers else GroupTile)(OPERAND, self.memory)

    def shared(self, base: Int32) -> WidenedShared:
        memory, common, arriving = self.memory, super().shared(base), self.spec.tile.arriving
        barriers = base + Int32(memory.barriers + 8 * (memory.num_barriers - 4 * arriving))
        k_bytes, v_bytes = (self.spec.tile.cols * pitch for pitch in (memory.arriving_k_pitch, memory.arriving_v_pitch))
        k_ring, v_ring = base + Int32(memory.arriving_k_ring), base + Int32(memory.arriving_v_ring)
        writers = 32 if self.gathers else 1  # every lane, or TMA
        return WidenedShared(
            common.q,
            dataclasses.replace(common.k, writers=self.helpers),
            dataclasses.replace(common.v, writers=self.helpers),
            common.records,
            Ring(arriving, k_bytes, k_ring, barriers, writers),
            Ring(arriving, v_bytes, v_ring, barriers + Int32(16 * arriving), writers),
        )

    def boxes(self, maps: Maps) -> tuple[Boxes, Boxes]:
        """One of whole rows."""
        k, v = self.memory.arriving_k_pitch, self.memory.arriving_v_pitch
        return Boxes(maps.k, 1, k, k), Boxes(maps.v, 1, v, v)

    # --- q ----------------------------------------------------------------------------------------------------------

    def ready_q(self, p: Fa3Params, work: QueryTile, lanes: GroupLanes, q_rows: Int32, scale: Float32) -> list[Float32]:
        """A scale a row."""
        if self.spec.dtype == OPERAND:
            return [scale, scale]
        # Put together for every query tile: between them there is no register for it.
        scale = p.scale * device_scale(p.scale0) * device_scale(p.scale1)
        return Normalisation(self.memory, lanes).run(q_rows, scale)

    def softmax(self, p: Fa3Params, work: QueryTile, lanes: GroupLanes, scale: Any) -> OnlineSoftmax:
        if self.spec.scores:
            return OnlineSoftmax(self.tile, Float32(ptx.LOG2E))
        scales = [ptx.fmax(x, Float32(LEAST_SCALE)) for x in scale]
        return RowSoftmax(self.tile, scales[0], scales)

    def scale_step(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes, scale: Any) -> RowScales:
        return RowScales(lambda: scale)

    # --- widening ---------------------------------------------------------------------------------------------------

    def work(self, warp: Int32, lane: Int32) -> Widening:
        memory, stored = self.memory, self.spec.kv_dtype
        k = Rows(memory.qk_columns, memory.arriving_k_pitch, Fp8(OPERAND, stored, native=True))
        v = Rows(memory.vo_columns, memory.arriving_v_pitch, Fp8(OPERAND, stored, native=True))
        return Widening(memory, warp, lane, self.helpers, k, v)

    def first_place(self) -> Places:
        return Places(Pair(start(), start()), Pair(start(), start()))

    @cute.jit
    def help(self, shared: Shared, work: cutlass.Constexpr, at: Places, total: Int32, valid: Int32) -> Any:
        """The next K before V: math groups need it first."""
        k, v = at.k, at.v
        if total > 0:
            k = self.widen_k(shared, work, k)
            for step in cutlass.range(1, total, unroll=1):
                k = self.widen_k(shared, work, k)
                v = self.widen_v(shared, work, v, ptx.select(step == 1, valid, Int32(self.spec.tile.cols)))
            v = self.widen_v(shared, work, v, ptx.select(total == 1, valid, Int32(self.spec.tile.cols)))
        return Places(k, v)

    def widen_k(self, shared: Shared, work: Widening, at: Pair) -> Pair:
        arriving, ring = shared.arriving_k, shared.k
        arriving.wait_full(at.arriving)
        ring.wait_empty(at.operand)
        work.run(work.k, arriving.address(at.arriving), ring.address(at.operand))
        self.made([arriving.empty(at.arriving), ring.full(at.operand)], work.lane)
        return Pair(arriving.next(at.arriving), ring.next(at.operand))

    @cute.jit
    def widen_v(self, shared: Shared, work: cutlass.Constexpr, at: Pair, valid: Int32) -> Any:
        arriving, ring = shared.arriving_v, shared.v
        arriving.wait_full(at.arriving)
        if cutlass.const_expr(self.spec.schedule == "items" and not self.gathers):  # noqa: SIM102
            if valid < self.spec.tile.cols:
                work.clear(work.v, arriving.address(at.arriving), valid)
        ring.wait_empty(at.operand)
        work.run(work.v, arriving.address(at.arriving), ring.address(at.operand))
        self.made([arriving.empty(at.arriving), ring.full(at.operand)], work.lane)
        return Pair(arriving.next(at.arriving), ring.next(at.operand))
