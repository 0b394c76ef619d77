"""Map of a persistent CTA's shared memory. Plain numbers: the host needs them without the DSL.

A kernel family declares its rings and scratch regions in order; all offsets follow from that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, Protocol

from cute_attn.kernels.formats import LINE

BARRIER_BYTES = 8
RECORD_BYTES = 64  # of a query tile's record
RECORDS_RING = "q"  # whose slots the records belong to, and are released with


class RingLayout(NamedTuple):
    """Ring of slots, each with a full and an empty barrier."""

    name: str
    stages: int
    slot_bytes: int

    @property
    def bytes(self) -> int:
        return self.stages * self.slot_bytes

    @property
    def barrier_bytes(self) -> int:
        """Bytes of the full barriers and of the empty barriers behind them."""
        return 2 * self.stages * BARRIER_BYTES


class Scratch(NamedTuple):
    """Region that no ring guards."""

    name: str
    bytes: int


class Region(NamedTuple):
    """Bytes [offset, offset + bytes) of shared memory."""

    offset: int
    bytes: int


class RingMemory:
    """Shared memory of rings and scratch. Regions by name, in order of address: the slots of every ring, scratch, the
    barriers of every ring, and the records of query tiles, one per `PipelineState` of `RECORDS_RING`.
    """

    @property
    def rings(self) -> tuple[RingLayout, ...]:
        raise NotImplementedError

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        return ()

    @property
    def regions(self) -> dict[str, Region]:
        """All regions; those of barriers are named "q barriers" and so on."""
        sizes = {ring.name: ring.bytes for ring in self.rings} | {part.name: part.bytes for part in self.scratch}
        sizes |= {barriers_of(ring.name): ring.barrier_bytes for ring in self.rings}
        regions, end = {}, 0
        for name, size in sizes.items():
            regions[name] = Region(end, size)
            end += size
        first_record = -(-end // RECORD_BYTES) * RECORD_BYTES
        return {**regions, "records": Region(first_record, 2 * self.ring(RECORDS_RING).stages * RECORD_BYTES)}

    def ring(self, name: str) -> RingLayout:
        return next(ring for ring in self.rings if ring.name == name)

    def offset(self, name: str) -> int:
        return self.regions[name].offset

    def barriers(self, name: str) -> int:
        """Offset of the full barriers of a ring; its empty barriers follow."""
        return self.offset(barriers_of(name))

    @property
    def bytes(self) -> int:
        return sum(self.regions["records"])


def barriers_of(ring: str) -> str:
    return f"{ring} barriers"


class MemoryRegion:
    """Bytes of shared memory behind those of the regions that a `MemoryMap` declares before; read as their offset."""

    def __init__(self, size: Callable[[Any], int]) -> None:
        self.size = size

    def __get__(self, memory: Any, owner: type) -> int:
        return sum(region.size(memory) for region in takewhile(lambda region: region is not self, regions_of(owner)))


def regions_of(owner: type) -> list[MemoryRegion]:
    return [value for value in vars(owner).values() if isinstance(value, MemoryRegion)]


class MemoryMap:
    """Map of shared memory whose regions follow each other in the order of their declaration."""

    @property
    def bytes(self) -> int:
        return sum(region.size(self) for region in regions_of(type(self)))


class PersistentTile(Protocol):
    """Packed query rows by kv tokens of a work item, and the rows of its TMA boxes of q and of k. The CTAs that share
    it, those that an SM runs at a time, and the threads of each.
    """

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def q_box_rows(self) -> int: ...

    @property
    def k_box_rows(self) -> int: ...

    @property
    def ctas(self) -> int: ...

    @property
    def per_sm(self) -> int: ...

    @property
    def threads(self) -> int: ...


class LoadedRows(NamedTuple):
    """Rows of K or V as the producer loads them: `columns` pieces of `items` elements each, rows of a piece `pitch`
    bytes apart.
    """

    columns: int
    items: int
    pitch: int


@dataclass(frozen=True)
class TileMemory(RingMemory):
    """Shared memory of query, K and V tiles of one family; subclasses declare their rings.

    An operand tile is stored in columns: 128-byte lines of all rows, one column after the other, each as TMA writes it
    with the 128-byte swizzle.
    """

    item_bytes: ClassVar[int] = 2
    tile: PersistentTile
    head_dim_qk: int
    head_dim_vo: int

    @property
    def line_items(self) -> int:
        return LINE // self.item_bytes

    @property
    def qk_columns(self) -> int:
        return -(-self.head_dim_qk // self.line_items)

    @property
    def vo_columns(self) -> int:
        return -(-self.head_dim_vo // self.line_items)

    def columns(self, operand: str) -> int:
        """Columns of a row of operand "k" or "v"."""
        return self.vo_columns if operand == "v" else self.qk_columns

    def loaded(self, operand: str) -> LoadedRows:
        """Rows of operand "k" or "v" as the producer loads them."""
        return LoadedRows(self.columns(operand), self.line_items, LINE)

    def loaded_ring(self, operand: str) -> str:
        """Name of the ring into which operand "k" or "v" is loaded: a staging ring where warps transform its tiles."""
        staged = f"staged_{operand}"
        return staged if any(ring.name == staged for ring in self.rings) else operand


@dataclass(frozen=True)
class StagedKvMemory(TileMemory):
    """Shared memory of fp8 K and V under 16-bit q: whole rows are staged, of as many bytes as the 16-bit columns have
    elements.
    """

    def pitch(self, operand: str) -> int:
        """Bytes of a staged row."""
        return self.columns(operand) * self.line_items

    def staged_bytes(self, operand: str) -> int:
        """Bytes of a staged tile."""
        return self.tile.cols * self.pitch(operand)

    def staged_rings(self, stages: int) -> list[RingLayout]:
        """Returns the rings of staged tiles."""
        return [RingLayout(f"staged_{operand}", stages, self.staged_bytes(operand)) for operand in "kv"]

    def loaded(self, operand: str) -> LoadedRows:
        """Whole rows: one piece."""
        return LoadedRows(1, self.pitch(operand), self.pitch(operand))
