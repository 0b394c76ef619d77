"""Rings of shared memory between producer, transform and consumer warps, with a full and an empty barrier per slot."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx, sm90


class PipelineState(NamedTuple):
    """Slot and phase of a thread in a ring, as one index over two passes of the slots: one register instead of two."""

    index_phase: Int32


def start() -> PipelineState:
    return PipelineState(Int32(0))


@dataclass(frozen=True)
class Ring:
    """Slots of `slot_bytes` at `data`; their full barriers, with `writers` arrivals each, at `barriers`, followed by
    the empty barriers.
    """

    stages: int
    slot_bytes: int
    data: Int32
    barriers: Int32
    writers: int = 1

    def initialise(self, readers: int) -> None:
        for i in range(self.stages):
            sm90.barrier_init(self.barriers + Int32(8 * i), self.writers)
            sm90.barrier_init(self.barriers + Int32(8 * (self.stages + i)), readers)

    def slot(self, state: PipelineState) -> Int32:
        if self.stages & (self.stages - 1) == 0:
            return state.index_phase & Int32(self.stages - 1)
        return ptx.minimum_u32(state.index_phase, state.index_phase - self.stages)

    def parity(self, state: PipelineState) -> Int32:
        """Phase parity: that of the number of passes over the slot."""
        return ptx.select(state.index_phase < Int32(self.stages), Int32(0), Int32(1))

    def address(self, state: PipelineState) -> Int32:
        return self.data + self.slot(state) * self.slot_bytes

    def full(self, state: PipelineState) -> Int32:
        return self.barriers + self.slot(state) * 8

    def empty(self, state: PipelineState) -> Int32:
        return self.barriers + self.slot(state) * 8 + Int32(8 * self.stages)

    def wait_full(self, state: PipelineState) -> None:
        sm90.barrier_wait(self.full(state), self.parity(state))

    def wait_empty(self, state: PipelineState) -> None:
        sm90.barrier_wait(self.empty(state), self.parity(state) ^ 1)

    @cute.jit
    def release(self, state: PipelineState, lane: Int32) -> None:
        """Arrives at the empty barrier, once per warp, after its last read of the slot."""
        if lane == 0:
            sm90.barrier_arrive(self.empty(state))

    def next(self, state: PipelineState) -> PipelineState:
        index_phase = state.index_phase + 1
        return PipelineState(ptx.select(index_phase == Int32(2 * self.stages), Int32(0), index_phase))

    def previous(self, state: PipelineState) -> PipelineState:
        return PipelineState(ptx.select(state.index_phase == 0, Int32(2 * self.stages), state.index_phase) - 1)
