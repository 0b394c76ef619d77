"""Rings of shared memory between the producer and the math warps: a full and an empty barrier a slot."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx, sm90


class Place(NamedTuple):
    """Where a thread is in a ring: how far in two passes over its slots. One register, where registers are scarce."""

    turn: Int32


def start() -> Place:
    return Place(Int32(0))


@dataclass(frozen=True)
class Ring:
    """Slots of `slot_bytes` from `data`; their full barriers, of `writers` arrivals, from `barriers`, then their empty
    ones.
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

    def slot(self, place: Place) -> Int32:
        if self.stages & (self.stages - 1) == 0:
            return place.turn & Int32(self.stages - 1)
        return ptx.minimum_u32(place.turn, place.turn - self.stages)

    def parity(self, place: Place) -> Int32:
        """Of the passes over the slot."""
        return ptx.select(place.turn < Int32(self.stages), Int32(0), Int32(1))

    def address(self, place: Place) -> Int32:
        return self.data + self.slot(place) * self.slot_bytes

    def full(self, place: Place) -> Int32:
        return self.barriers + self.slot(place) * 8

    def empty(self, place: Place) -> Int32:
        return self.barriers + self.slot(place) * 8 + Int32(8 * self.stages)

    def wait_full(self, place: Place) -> None:
        sm90.barrier_wait(self.full(place), self.parity(place))

    def wait_empty(self, place: Place) -> None:
        sm90.barrier_wait(self.empty(place), self.parity(place) ^ 1)

    @cute.jit
    def release(self, place: Place, lane: Int32) -> None:
        """This warp reads the slot no more."""
        if lane == 0:
            sm90.barrier_arrive(self.empty(place))

    def next(self, place: Place) -> Place:
        turn = place.turn + 1
        return Place(ptx.select(turn == Int32(2 * self.stages), Int32(0), turn))

    def previous(self, place: Place) -> Place:
        return Place(ptx.select(place.turn == 0, Int32(2 * self.stages), place.turn) - 1)
