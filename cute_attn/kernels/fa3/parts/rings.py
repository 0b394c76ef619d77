"""Shared-memory rings between the producer and the math warpgroups of the Hopper kernel."""

from dataclasses import dataclass

from cutlass import Int32

from cute_attn.kernels.blocks.pipeline import PipelineState, Ring
from cute_attn.kernels.fa3.smem import RECORD_BYTES, HopperMemory


@dataclass(frozen=True)
class SmemRings:
    """Rings and tile records shared by producer, transform and consumer warps."""

    q: Ring
    k: Ring
    v: Ring
    records: Int32  # of query tiles, one per `PipelineState` of Q's ring

    @property
    def staged_k(self) -> Ring:
        """The ring into which K is copied."""
        return self.k

    @property
    def staged_v(self) -> Ring:
        return self.v

    @classmethod
    def of(cls, memory: HopperMemory, base: Int32, writers: int) -> "SmemRings":
        """Lays out the rings of `memory`; `writers`: warps that fill slots of K and V."""
        tile, barriers = memory.tile, base + Int32(memory.barriers)
        k_barriers = barriers + Int32(16 * tile.q_stages)
        return cls(
            Ring(tile.q_stages, memory.q_bytes, base, barriers),
            Ring(tile.stages, memory.k_bytes, base + Int32(memory.k_ring), k_barriers, writers),
            Ring(
                tile.stages,
                memory.v_bytes,
                base + Int32(memory.v_ring),
                k_barriers + Int32(16 * tile.stages),
                writers,
            ),
            base + Int32(memory.records),
        )

    def record(self, q: PipelineState) -> Int32:
        return self.records + q.index_phase * RECORD_BYTES
