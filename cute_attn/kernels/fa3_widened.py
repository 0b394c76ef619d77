"""The Hopper kernel for q of 16 bits over K and V of 8: helpers widen every tile, math groups know nothing of it."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks.boxes import Boxes
from cute_attn.kernels.blocks.convert import Fp8
from cute_attn.kernels.blocks.gather import NarrowPages
from cute_attn.kernels.blocks.pipeline import Place, Ring, Shared, start
from cute_attn.kernels.blocks.widen import P_DTYPE, Rows, WidenedTile, Widening
from cute_attn.kernels.fa3 import Maps
from cute_attn.kernels.fa3_helped import HELPER_BARRIER, HELPERS, HelpedProgram
from cute_attn.kernels.memory import WidenedMemory
from cute_attn.kernels.spec import Fa3Spec


class Places(NamedTuple):
    """Of a kv tile: in the arriving rings, and in the operands'."""

    arriving: Place
    operand: Place


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

    def group_tile(self) -> WidenedTile:
        return WidenedTile(self.spec.dtype, self.memory)

    def shared(self, base: Int32) -> WidenedShared:
        memory, common, arriving = self.memory, super().shared(base), self.spec.tile.arriving
        barriers = base + Int32(memory.barriers + 8 * (memory.num_barriers - 4 * arriving))
        k_bytes, v_bytes = (self.spec.tile.cols * pitch for pitch in (memory.arriving_k_pitch, memory.arriving_v_pitch))
        k_ring, v_ring = base + Int32(memory.arriving_k_ring), base + Int32(memory.arriving_v_ring)
        writers = 32 if self.gathers else 1  # every lane, or TMA
        return WidenedShared(
            common.q,
            dataclasses.replace(common.k, writers=HELPERS),
            dataclasses.replace(common.v, writers=HELPERS),
            common.records,
            Ring(arriving, k_bytes, k_ring, barriers, writers),
            Ring(arriving, v_bytes, v_ring, barriers + Int32(16 * arriving), writers),
        )

    def boxes(self, maps: Maps) -> tuple[Boxes, Boxes]:
        """One of whole rows."""
        k, v = self.memory.arriving_k_pitch, self.memory.arriving_v_pitch
        return Boxes(maps.k, 1, k, k), Boxes(maps.v, 1, v, v)

    # --- widening ---------------------------------------------------------------------------------------------------

    def work(self, warp: Int32, lane: Int32) -> Widening:
        memory, stored = self.memory, self.spec.kv_dtype
        k = Rows(memory.qk_columns, memory.arriving_k_pitch, Fp8(self.spec.dtype, stored, native=True))
        v = Rows(memory.vo_columns, memory.arriving_v_pitch, Fp8(P_DTYPE, stored, native=True))
        return Widening(memory, warp, lane, HELPERS, HELPER_BARRIER, k, v)

    def first_place(self) -> Places:
        return Places(start(), start())

    @cute.jit
    def help(self, shared: Shared, work: cutlass.Constexpr, at: Places, valid: Int32) -> Any:
        k, v = shared.arriving_k, shared.arriving_v
        k.wait_full(at.arriving)
        shared.k.wait_empty(at.operand)
        work.run(work.k, k.address(at.arriving), shared.k.address(at.operand))
        self.made([k.empty(at.arriving), shared.k.full(at.operand)], work.lane)
        v.wait_full(at.arriving)
        if cutlass.const_expr(self.spec.schedule == "items" and not self.gathers):  # noqa: SIM102
            if valid < self.spec.tile.cols:
                work.clear(work.v, v.address(at.arriving), valid)
        shared.v.wait_empty(at.operand)
        work.run(work.v, v.address(at.arriving), shared.v.address(at.operand))
        self.made([v.empty(at.arriving), shared.v.full(at.operand)], work.lane)
        return Places(k.next(at.arriving), shared.k.next(at.operand))
