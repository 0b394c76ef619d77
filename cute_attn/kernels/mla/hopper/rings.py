"""Rings of the kernel on wgmma: query rows in one slot, tiles in two, half by half."""

from dataclasses import dataclass

from cutlass import Int32

from cute_attn.kernels.blocks import tma
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring
from cute_attn.kernels.blocks.smem_map import BARRIER_BYTES
from cute_attn.kernels.mla.hopper.smem import HALVES, RECORD_BYTES, HopperMlaMemory

PRODUCERS = 128  # threads, each of which arrives at the full barriers
WARPS = 4  # of an MMA warpgroup, each of which arrives at the empty barriers


@dataclass(frozen=True)
class Rings:
    memory: HopperMlaMemory
    base: Int32  # of shared memory

    @property
    def q(self) -> Ring:
        memory = self.memory
        return Ring(1, 0, self.base + Int32(memory.q), self.base + Int32(memory.barriers))

    def record(self, q: PipelineState) -> Int32:
        """Address of the record of a segment. There are two: Q is released before the segment's results are written."""
        return self.base + Int32(self.memory.records) + q.index_phase * RECORD_BYTES

    def half(self, index: Int32 | int) -> Ring:
        """Return the ring of a half of the tiles. Its slots begin where the tiles do."""
        memory = self.memory
        first = self.base + Int32(memory.barriers + 2 * BARRIER_BYTES)
        return Ring(memory.spec.stages, memory.slot_bytes, self.base, first + index * memory.half_barrier_bytes)

    def initialise(self) -> None:
        """For one thread; a CTA barrier must follow. A half is released by the warpgroup whose V operand it is, which
        has then seen P, and so all scores, of the tile."""
        self.q.initialise(PRODUCERS + 1, 2 * WARPS)  # and the record
        for index in range(HALVES):
            self.half(index).initialise(PRODUCERS, WARPS)
        tma.fence_barrier_init()
