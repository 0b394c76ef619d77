"""Rings of shared memory between producer, transform and consumer warps, with a full and an empty barrier per slot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.smem_map import RECORD_BYTES, RECORDS_RING, RingMemory, TileMemory


class PipelineState(NamedTuple):
    """Slot and phase of a thread in a ring, as one index over two passes of the slots: one register instead of two."""

    index_phase: Int32


def start() -> PipelineState:
    return PipelineState(Int32(0))


@dataclass(frozen=True)
class Ring:
    """Slots of `slot_bytes` at `data`; their full barriers at `barriers`, followed by the empty barriers."""

    stages: int
    slot_bytes: int
    data: Int32
    barriers: Int32

    def initialise(self, writers: int, readers: int) -> None:
        """Initialises the barriers with their numbers of arrivals; those at which nobody arrives are not used."""
        for i in range(self.stages):
            for barrier, arrivals in ((i, writers), (self.stages + i, readers)):
                if arrivals:
                    tma.barrier_init(self.barriers + Int32(8 * barrier), arrivals)

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
        tma.barrier_wait(self.full(state), self.parity(state))

    def wait_empty(self, state: PipelineState) -> None:
        tma.barrier_wait(self.empty(state), self.parity(state) ^ 1)

    def wait_released(self, state: PipelineState) -> None:
        """Waits until the readers have released what is in the slot now."""
        tma.barrier_wait(self.empty(state), self.parity(state))

    @cute.jit
    def fill(self, state: PipelineState, lane: Int32) -> None:
        """Arrives at the full barrier, once per warp, after its last write to the slot."""
        if lane == 0:
            tma.barrier_arrive(self.full(state))

    @cute.jit
    def release(self, state: PipelineState, lane: Int32) -> None:
        """Arrives at the empty barrier, once per warp, after its last read of the slot."""
        if lane == 0:
            tma.barrier_arrive(self.empty(state))

    def next(self, state: PipelineState) -> PipelineState:
        index_phase = state.index_phase + 1
        return PipelineState(ptx.select(index_phase == Int32(2 * self.stages), Int32(0), index_phase))

    def previous(self, state: PipelineState) -> PipelineState:
        return PipelineState(ptx.select(state.index_phase == 0, Int32(2 * self.stages), state.index_phase) - 1)


@dataclass(frozen=True)
class WarpRole:
    """Warps with one task: the arrival counts of all barriers follow from their rings. `fills`: rings whose slots they
    fill, with their arrivals at a full barrier; `reads`: rings whose slots each of these warps releases with one
    arrival. Readers of query tiles' records release `RECORDS_RING`, even if they do not read its slots.
    """

    name: str
    warps: int
    fills: Mapping[str, int]
    reads: tuple[str, ...] = ()
    reads_records: bool = False

    def releases(self, ring: str) -> bool:
        return ring in self.reads or (ring == RECORDS_RING and self.reads_records)


@dataclass(frozen=True)
class Rings:
    """Rings of a CTA and its scratch regions, by name, in shared memory from `base`."""

    base: Int32
    by_name: Mapping[str, Ring]
    scratch: Mapping[str, Int32]

    @classmethod
    def at(cls, memory: RingMemory, base: Int32, types: Mapping[str, type[Ring]]) -> "Rings":
        """Returns those of a layout. `types`: of the rings that are no plain `Ring`."""
        rings = {
            ring.name: types.get(ring.name, Ring)(
                ring.stages,
                ring.slot_bytes,
                base + Int32(memory.offset(ring.name)),
                base + Int32(memory.barriers(ring.name)),
            )
            for ring in memory.rings
        }
        return Rings(base, rings, {part.name: base + Int32(memory.offset(part.name)) for part in memory.scratch})

    def initialise(self, roles: Sequence[WarpRole]) -> None:
        for name, ring in self.by_name.items():
            readers = sum(role.warps for role in roles if role.releases(name))
            ring.initialise(sum(role.fills.get(name, 0) for role in roles), readers)


@dataclass(frozen=True)
class SmemRings(Rings):
    """Rings of a persistent CTA, and the records of its query tiles."""

    staged_k: Ring  # into which K is loaded: the ring of the operands, or that of tiles to be transformed
    staged_v: Ring
    records: Int32  # one per `PipelineState` of Q's ring: Q is released before the tile's results are written

    @classmethod
    def of(cls, memory: TileMemory, base: Int32) -> "SmemRings":
        plain, records = Rings.at(memory, base, cls.ring_types(memory)), memory.offset("records")
        staged_k, staged_v = (plain.by_name[memory.loaded_ring(operand)] for operand in ("k", "v"))
        return cls(base, plain.by_name, plain.scratch, staged_k, staged_v, base + Int32(records))

    @classmethod
    def ring_types(cls, memory: Any) -> Mapping[str, type[Ring]]:
        return {}

    @property
    def q(self) -> Ring:
        return self.by_name["q"]

    @property
    def k(self) -> Ring:
        return self.by_name["k"]

    @property
    def v(self) -> Ring:
        return self.by_name["v"]

    def next_head_block(self, q: PipelineState) -> Int32:
        """Waits for the next query tile; returns the head block of its record, negative after the last tile."""
        self.q.wait_full(q)
        return cute.arch.make_warp_uniform(ptx.ld_shared_b32(self.record(q)))

    def record(self, q: PipelineState) -> Int32:
        return self.records + q.index_phase * RECORD_BYTES
