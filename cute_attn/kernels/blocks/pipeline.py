"""Rings of shared memory between the producer and the math warps: a full and an empty barrier a slot."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx, sm90


class Place(NamedTuple):
    """Where a thread is in a ring: the slot, and the parity of its passes over it."""

    slot: Int32
    parity: Int32


def start() -> Place:
    return Place(Int32(0), Int32(0))


@dataclass(frozen=True)
class Ring:
    """Slots of `slot_bytes` from `data`; their full barriers from `barriers`, then their empty ones."""

    stages: int
    slot_bytes: int
    data: Int32
    barriers: Int32

    def initialise(self, readers: int, writers: int = 1) -> None:
        for i in range(self.stages):
            sm90.barrier_init(self.barriers + Int32(8 * i), writers)
            sm90.barrier_init(self.barriers + Int32(8 * (self.stages + i)), readers)

    def address(self, place: Place) -> Int32:
        return self.data + place.slot * self.slot_bytes

    def full(self, place: Place) -> Int32:
        return self.barriers + place.slot * 8

    def empty(self, place: Place) -> Int32:
        return self.barriers + place.slot * 8 + Int32(8 * self.stages)

    def wait_full(self, place: Place) -> None:
        sm90.barrier_wait(self.full(place), place.parity)

    def wait_empty(self, place: Place) -> None:
        sm90.barrier_wait(self.empty(place), place.parity ^ 1)

    @cute.jit
    def release(self, place: Place, lane: Int32) -> None:
        """This warp reads the slot no more."""
        if lane == 0:
            sm90.barrier_arrive(self.empty(place))

    def next(self, place: Place) -> Place:
        if self.stages == 1:
            return Place(place.slot, place.parity ^ 1)
        slot = place.slot + 1
        wraps = slot == Int32(self.stages)
        return Place(ptx.select(wraps, Int32(0), slot), ptx.select(wraps, place.parity ^ 1, place.parity))
