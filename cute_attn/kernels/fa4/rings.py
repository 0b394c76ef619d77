"""Rings whose slots lie in tensor memory: one or two slots, so that slot and phase are bits of the pipeline state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32

from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings
from cute_attn.kernels.blocks.smem_map import TileMemory
from cute_attn.kernels.fa4.smem import BlackwellMemory


class TmemRing(Ring):
    """Ring of one or two slots, whose states need no comparisons: fewer instructions per kv tile in every role."""

    def parity(self, state: PipelineState) -> Int32:
        return state.index_phase >> (self.stages - 1)

    def next(self, state: PipelineState) -> PipelineState:
        return PipelineState((state.index_phase + 1) & Int32(2 * self.stages - 1))


@dataclass(frozen=True)
class BlackwellRings(SmemRings):
    """Rings of a CTA. Subclasses name the types of rings that several CTAs share."""

    tmem_ring: ClassVar[type[Ring]] = TmemRing
    shared: ClassVar[Mapping[str, type[Ring]]] = {}

    @classmethod
    def of(cls, memory: TileMemory, base: Int32) -> "BlackwellRings":
        assert isinstance(memory, BlackwellMemory)
        rings = SmemRings.of(memory, base)
        types = {**dict.fromkeys(memory.tmem_rings, cls.tmem_ring), **cls.shared}
        by_name = {
            name: types.get(name, Ring)(ring.stages, ring.slot_bytes, ring.data, ring.barriers)
            for name, ring in rings.by_name.items()
        }
        return cls(by_name, rings.staged_k, rings.staged_v, rings.records, rings.scratch)
