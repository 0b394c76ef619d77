"""Memory with shadow state: which bytes exist, are initialised and writable, and which agents accessed them last."""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np

from cute_attn.emulator.clocks import Clocks, Conflict, Op, Shadow
from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.errors import BarrierFault, MemoryFault, ProxyFault, Race, Uninitialised

RANK_SHIFT = 24  # shared addresses: CTA rank in the cluster above the offset, as hardware has it
OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_START = 1024  # bytes below are reserved by the system
GENERIC_SHARED = 0x7E << 56  # window of shared memory in the generic address space
GENERIC_PARAM = 0x7D << 56
INITIALISED = 0xFF
MBARRIER = 0xFE  # initialised, but off limits to loads and stores


class Bytes:
    """Byte array that can be read and written in words at any offset."""

    def __init__(self, data: Array) -> None:
        self.data, self.size, self.stride = data, len(data), 1
        self._windows: dict[int, Array] = {}

    def windows(self, nbytes: int) -> Array:
        """View whose item i is the word of `nbytes` bytes at byte offset i."""
        view = self._windows.get(nbytes)
        if view is None:
            shape, kind = (max(self.size - nbytes + 1, 0),), word_type(nbytes)
            view = self._windows[nbytes] = np.ndarray(shape, kind, self.data, strides=(self.stride,))  # type: ignore[arg-type]
        return view

    def first_unset(self, offsets: Array, nbytes: int) -> int | None:
        """Index of the first word with a byte that is no set flag, or None."""
        seen = self.windows(nbytes)[offsets].view(np.uint8)
        if len(seen) == 0 or seen.min() == INITIALISED:
            return None
        return int(np.flatnonzero(seen.reshape(len(offsets), -1).min(axis=1) != INITIALISED)[0])


def word_type(nbytes: int) -> str:
    """Name of the numpy type of words of so many bytes."""
    return f"u{nbytes}" if nbytes <= 8 else f"V{nbytes}"


def put(data: Bytes, valid: Bytes, offsets: Array, words: Array) -> None:
    """Write words, and flag their bytes as valid."""
    nbytes = words.dtype.itemsize
    data.windows(nbytes)[offsets] = words
    valid.windows(nbytes)[offsets] = np.full(nbytes, INITIALISED, np.uint8).view(word_type(nbytes))


class Flags(Bytes):
    """One flag byte per byte of a memory. Where all are set, all words are one: no flag is ever taken back."""

    def __init__(self, size: int, on: bool) -> None:
        super().__init__(np.zeros(size, np.uint8))
        if on:
            self.set_all()

    @property
    def all(self) -> bool:
        return self.stride == 0

    def set_all(self) -> None:
        self.data, self.stride = np.full(1, INITIALISED, np.uint8), 0
        self._windows.clear()

    def windows(self, nbytes: int) -> Array:
        if self.all and len(self.data) < nbytes:
            self.data = np.full(nbytes, INITIALISED, np.uint8)
        return super().windows(nbytes)


def cells_of(offsets: Array, nbytes: int) -> Array:
    """4-byte cells of words at `offsets`: [words, cells per word]."""
    first = offsets >> 2
    if nbytes <= 4:
        return first[:, None]
    return first[:, None] + np.arange(nbytes // 4)


class SharedMemory:
    """Shared memory of one CTA. `checks`: of races."""

    def __init__(self, nbytes: int, clocks: Clocks, checks: bool) -> None:
        self.size = nbytes
        self.bytes = Bytes(np.zeros(nbytes, np.uint8))
        self.valid = Bytes(np.zeros(nbytes, np.uint8))
        self.clocks = clocks
        self.shadow = Shadow(nbytes, clocks) if checks else None

    def check(self, offsets: Array, nbytes: int, what: str) -> None:
        """Check that words of `nbytes` are inside, and aligned to their size."""
        if len(offsets) == 0:
            return
        low, high = int(offsets.min()), int(offsets.max())
        if low < SHARED_START or high + nbytes > self.size:
            lane = int(np.flatnonzero((offsets < SHARED_START) | (offsets + nbytes > self.size))[0])
            raise MemoryFault(
                f"{what} of {nbytes} bytes at shared {int(offsets[lane]):#x} "
                f"is outside {SHARED_START:#x}..{self.size:#x}",
                lane,
            )
        if some(offsets & (nbytes - 1)):
            lane = int(np.flatnonzero(offsets & (nbytes - 1))[0])
            raise MemoryFault(f"{what} at shared {int(offsets[lane]):#x} is not aligned to {nbytes} bytes", lane)

    def load(self, offsets: Array, nbytes: int, by: Array | Op, what: str) -> Array:
        """Load words for warps (agents, one per word) or for an operation. `check` must be called before."""
        self._require_valid(offsets, nbytes, what)
        self._order(offsets, nbytes, by, what, write=False)
        return self.bytes.windows(nbytes)[offsets]

    def update(self, offsets: Array, nbytes: int, agents: Array, what: str) -> None:
        """Check and record that warps update words, like `load`."""
        self._require_valid(offsets, nbytes, what)
        if self.shadow is not None:
            self._refuse(self.shadow.update(cells_of(offsets, nbytes), agents), offsets, what)

    def store(self, offsets: Array, words: Array, by: Array | Op, what: str) -> None:
        """Store words, like `load`. A warp must not overwrite an mbarrier."""
        nbytes = words.dtype.itemsize
        if isinstance(by, np.ndarray) and some(self.valid.windows(nbytes)[offsets].view(np.uint8) == MBARRIER):
            raise BarrierFault(f"{what} overwrites an mbarrier")
        self._order(offsets, nbytes, by, what, write=True)
        put(self.bytes, self.valid, offsets, words)

    def _require_valid(self, offsets: Array, nbytes: int, what: str) -> None:
        lane = self.valid.first_unset(offsets, nbytes)
        if lane is None:
            return
        if some(self.valid.windows(nbytes)[offsets].view(np.uint8) == MBARRIER):
            raise BarrierFault(f"{what} reads an mbarrier")
        raise Uninitialised(f"{what} reads uninitialised shared memory at {int(offsets[lane]):#x}", lane)

    def _order(self, offsets: Array, nbytes: int, by: Array | Op, what: str, write: bool) -> None:
        """Record an access, and raise what its conflict is, if it has one."""
        shadow = self.shadow
        if shadow is None:
            return
        if isinstance(by, Op):
            cells = cells_of(offsets, nbytes).ravel() if nbytes >= 4 else np.unique(offsets >> 2)
            conflict = shadow.op_write(cells, by) if write else shadow.op_read(cells, by)
        else:
            cells = cells_of(offsets, nbytes)
            conflict = shadow.write(cells, by) if write else shadow.read(cells, by)
        self._refuse(conflict, offsets, what)

    def _refuse(self, conflict: Conflict | None, offsets: Array, what: str) -> None:
        if conflict is None:
            return
        kind, agent, lane = conflict
        if kind == "proxy":
            raise ProxyFault(
                f"{what} reads shared memory that {self.clocks.name(agent)} wrote with ordinary stores or updates: "
                "no fence.proxy.async lies between"
            )
        at = int(offsets.min() if lane is None else offsets[lane])
        raise Race(f"{what} at shared {at:#x} races with a {kind} by {self.clocks.name(agent)}", lane)


class Region:
    """Range of global memory. `exists`, `valid` and `writable` have one flag byte per byte of it; `exists` says whether
    all of it does at first.

    Who accessed each 4-byte cell last is kept as zeros plus what differs: memory that is never touched costs nothing
    then, as calloc does not touch it either. A workspace of 32 MB has a history of 192.
    """

    def __init__(self, name: str, base: int, data: Array, writable: bool, valid: bool, exists: bool = True) -> None:
        self.name, self.base, self.size = name, base, len(data)
        self.bytes = Bytes(data)
        self.valid = Flags(len(data), valid)
        self.exists = Flags(len(data), exists)
        self.writable = Flags(len(data), writable)
        self.contested = False  # whether races are possible at all, in this launch
        self._earliest = 0  # epoch of cells that no one accessed yet: 0 stands for it in the arrays of epochs
        self._forget()

    def start_launch(self, dependent: bool) -> None:
        """Reset the access history. The predecessor of a dependent launch may still read and write every byte."""
        if self._accessed:
            self._forget()
        self._earliest = int(dependent)
        self.contested = dependent or bool(self.writable.data.any())

    def last_writes(self, cells: Array) -> tuple[Array, Array]:
        """Launch-wide agents (0: an earlier launch) that wrote these cells last, and their epochs (0: never)."""
        return self._writer[cells], self._written[cells] + np.int32(self._earliest)

    def last_reads(self, cells: Array) -> tuple[Array, Array]:
        """The same for the last read since then."""
        return self._reader[cells], self._read_at[cells] + np.int32(self._earliest)

    def write(self, cells: Array, agents: Array | int, epochs: Array | int) -> None:
        """Record writes of cells. Of several agents that write a cell at once, `last_writes` names one."""
        self._writer[cells] = agents
        self._written[cells] = epochs - self._earliest
        self._read_at[cells] = -self._earliest
        self._accessed = True

    def read(self, cells: Array, agents: Array | int, epochs: Array | int) -> None:
        """Record reads of cells."""
        self._reader[cells] = agents
        self._read_at[cells] = epochs - self._earliest
        self._accessed = True

    def _forget(self) -> None:
        cells = (self.size + 7) // 4
        self._writer, self._reader = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
        self._written, self._read_at = np.zeros(cells, np.int32), np.zeros(cells, np.int32)
        self._accessed = False


class GlobalMemory:
    """Ranges of global memory, by address. Overlapping ranges must be added as one."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.bases: list[int] = []

    def add(
        self,
        name: str,
        address: int,
        nbytes: int,
        *,
        writable: bool = True,
        valid: bool = True,
        exists: bool = True,
        data: Array | None = None,
    ) -> Region:
        """Add `nbytes` of this process's memory at `address`, or `data`, a flat array of as many bytes, as if it were
        there."""
        if data is None:
            data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        elif not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (nbytes,):
            got = f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
            raise MemoryFault(f"data of {name} must be a flat uint8 array of nbytes = {nbytes}, got {got}")
        region = Region(name, address, data, writable, valid, exists)
        at = bisect.bisect(self.bases, address)
        after = self.bases[at] if at < len(self.bases) else 1 << 64
        before = self.regions[at - 1] if at else None
        if address + nbytes > after or (before is not None and before.base + before.size > address):
            raise MemoryFault(f"global range {name} overlaps another")
        self.bases.insert(at, address)
        self.regions.insert(at, region)
        return region

    def split(self, addresses: Array, nbytes: int, what: str) -> list[tuple[Region, Any, Array]]:
        """Split words by region: (region, index of its words in `addresses`, offsets)."""
        if len(addresses) == 0:
            return []
        addresses = addresses.astype(np.uint64, copy=False)
        low, high = int(addresses.min()), int(addresses.max())
        at = bisect.bisect(self.bases, low) - 1
        if at >= 0:
            single = self.regions[at]
            if high + nbytes <= single.base + single.size:
                return [(single, slice(None), (addresses - np.uint64(single.base)).astype(np.int64))]
        owners = np.searchsorted(np.array(self.bases, np.uint64), addresses, side="right") - 1
        parts: list[tuple[Region, Any, Array]] = []
        for owner in np.unique(owners):
            positions = np.flatnonzero(owners == owner)
            region = self.regions[owner] if owner >= 0 else None
            outside: Array = (
                positions
                if region is None
                else positions[addresses[positions] + np.uint64(nbytes) > np.uint64(region.base + region.size)]
            )
            if region is None or len(outside):
                lane = int(outside[0])
                raise MemoryFault(self._outside(int(addresses[lane]), nbytes, what), lane)
            parts.append((region, positions, (addresses[positions] - np.uint64(region.base)).astype(np.int64)))
        return parts

    def _outside(self, address: int, nbytes: int, what: str) -> str:
        at = bisect.bisect(self.bases, address) - 1
        near = ""
        if at >= 0:
            region = self.regions[at]
            near = f"; {address - region.base} bytes into {region.name} of {region.size}"
        return f"{what} of {nbytes} bytes at {address:#x} is in no range of global memory{near}"


def check_global(region: Region, offsets: Array, nbytes: int, what: str, write: bool) -> None:
    """Check that bytes exist and that they are initialised (reads) or writable (writes)."""
    lane = region.exists.first_unset(offsets, nbytes)
    if lane is not None:
        raise MemoryFault(
            f"{what} touches bytes of {region.name} that belong to no tensor, at {int(offsets[lane])}", lane
        )
    if write:
        lane = region.writable.first_unset(offsets, nbytes)
        if lane is not None:
            raise MemoryFault(f"{what} writes to {region.name}, which the kernel may only read", lane)
        return
    lane = region.valid.first_unset(offsets, nbytes)
    if lane is not None:
        raise Uninitialised(
            f"{what} reads bytes of {region.name} that were never written, at {int(offsets[lane])}", lane
        )
