"""Tensor memory of one CTA: 128 lanes of 512 columns of 32 bits, allocated by columns.

All accesses are asynchronous. A *stream* is a sequence of operations that complete together: products of one
thread at its commit, loads and stores of one warp at its wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cute_attn.emulator.clocks import FENCED, ORDER, PROXY, TMEM, Clocks, Conflict, Op, Shadow
from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.errors import MemoryFault, Race, Uninitialised

LANES, COLUMNS = 128, 512
UNIT = 32  # columns; granularity of allocation
CELL_LANES = 16  # race checks have cells of half a warp's lanes, because some layouts use every other half
LANE_SHIFT = 16  # addresses: lane above column
WARP = -1  # in place of a lane: a stream of the whole warp


class Stream:
    """Asynchronous operations of one warp or thread, in order. Its channel always has an open, unobserved epoch."""

    def __init__(self, clocks: Clocks, agent: int, what: str) -> None:
        self.clocks, self.agent, self.what = clocks, agent, what
        self.channel = clocks.begin(agent, what).agent

    def op(self) -> Op:
        """Add an operation after all that the warp has observed and done, and after the stream's earlier ones."""
        clocks = self.clocks
        clock = clocks.v[self.agent].copy()
        epoch = int(clocks.latest[self.channel])
        clock[:, self.channel] = epoch
        clocks.go_on(self.agent)
        return Op(self.channel, epoch, clock, self.what, float(clocks.time[self.agent]))

    def commit(self) -> Op:
        """Close the epoch with an operation that publishes it, because tcgen05.commit implies fence::before."""
        op = self.op()
        if self.clocks.tensor_row == TMEM:
            op.clock[FENCED] = op.clock[FENCED:].max(axis=0)
        self.end()
        return op

    def end(self) -> None:
        """Close the epoch: later operations belong to the next one."""
        self.clocks.latest[self.channel] += 1

    def wait(self) -> None:
        """Record that the warp has observed the completion of all operations so far."""
        rows = ORDER, PROXY, self.clocks.tensor_row
        self.clocks.v[self.agent, rows, self.channel] = self.clocks.latest[self.channel]
        self.end()


@dataclass
class TensorMemory:
    clocks: Clocks
    checks: bool = True  # of races
    words: Array = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.uint32))
    valid: Array = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.bool_))
    owner: Array = field(default_factory=lambda: np.zeros(COLUMNS, np.int32))  # number of the allocation, 0: free
    shadow: Shadow | None = None
    count: int = 0
    last: int = COLUMNS  # columns of the latest allocation
    relinquished: bool = False
    streams: dict[tuple[int, str, int], Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.checks:
            self.shadow = Shadow(4 * (LANES // CELL_LANES) * COLUMNS, self.clocks, self.clocks.tensor_row)

    # --- allocation ---------------------------------------------------------------------------------------------------

    def check_count(self, columns: int, what: str) -> None:
        if not UNIT <= columns <= COLUMNS or columns & (columns - 1):
            raise MemoryFault(f"{what} of {columns} columns: a power of two of 32 to 512 is accepted")

    def check_allocation(self, columns: int) -> None:
        self.check_count(columns, "tcgen05.alloc")
        if self.relinquished:
            raise MemoryFault("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        if columns > self.last:
            raise MemoryFault(f"tcgen05.alloc of {columns} columns after one of {self.last}: counts may not increase")

    def allocate(self, start: int, columns: int) -> None:
        self.count += 1
        self.last = columns
        self.owner[start : start + columns] = self.count
        self.valid[:, start : start + columns] = False

    def free(self, address: int, columns: int, agent: int) -> None:
        """Deallocate columns, on behalf of warp `agent`."""
        self.check_count(columns, "tcgen05.dealloc")
        start = address & (COLUMNS * 2 - 1)
        number = int(self.owner[start]) if address < COLUMNS else 0
        held = np.flatnonzero(self.owner == number) if number else np.zeros(0, np.int64)
        if number == 0 or int(held[0]) != start or len(held) != columns:
            raise MemoryFault(
                f"tcgen05.dealloc of {columns} columns at {address:#x}, which is no allocation of that size"
            )
        self.owner[held] = 0
        stream = self.stream(agent, "tcgen05.dealloc")
        if self.shadow is None:
            return
        op = stream.op()
        if self.shadow.row == TMEM:  # it is not asynchronous: what others have published needs no fence::after
            op.clock[TMEM] = op.clock[FENCED:].max(axis=0)
        place = places(np.arange(LANES), held)
        self.refuse("tcgen05.dealloc", place, self.shadow.op_write(place.cells, op))
        stream.wait()

    # --- access -------------------------------------------------------------------------------------------------------

    def stream(self, agent: int, kind: str, lane: int = WARP) -> Stream:
        found = self.streams.get((agent, kind, lane))
        if found is None:
            thread = "" if lane == WARP else f", lane {lane}"
            name = f"{kind} of warp {(agent - 1) % self.clocks.warps}{thread}"
            found = self.streams[agent, kind, lane] = Stream(self.clocks, agent, name)
        return found

    def begin(self, agent: int, kind: str, lane: int = WARP) -> Op:
        return self.stream(agent, kind, lane).op()

    def check(self, columns: Array, what: str) -> None:
        """Check that columns exist and belong to one allocation."""
        low, high = int(columns.min()), int(columns.max())
        if high >= COLUMNS or low < 0:
            raise MemoryFault(f"{what} at columns {low}..{high} of tensor memory, which has {COLUMNS}")
        owners = self.owner[columns]
        if some(owners) < owners.size:
            missing = int(np.asarray(columns)[owners == 0].flat[0])
            raise MemoryFault(f"{what} at column {missing} of tensor memory, which is not allocated")
        if some(owners != owners.flat[0]):
            raise MemoryFault(f"{what} at columns {low}..{high} of tensor memory, of more than one allocation")

    def load(self, place: Places, by: Op | int, what: str) -> Array:
        """Load words, for an operation, or for a warp whose read is over at once: [lanes, columns]."""
        self.check(place.columns, what)
        seen = self.valid[place.lanes, place.columns]
        if some(seen) < seen.size:
            lane, column = np.argwhere(~seen)[0]
            at = f"lane {place.lanes[lane, 0]} column {place.columns[column]}"
            raise Uninitialised(f"{what} reads uninitialised tensor memory, {at}")
        if self.shadow is not None:
            # A warp's has a row for each cell: those of one load lie in several blocks, and no row may cross a block.
            self.refuse(
                what,
                place,
                self.shadow.op_read(place.cells, by)
                if isinstance(by, Op)
                else self.shadow.read(place.cells[:, None], np.full(len(place.cells), by)),
            )
        return self.words[place.lanes, place.columns]

    def store(self, place: Places, values: Array, op: Op, what: str) -> None:
        self.check(place.columns, what)
        if self.shadow is not None:
            self.refuse(what, place, self.shadow.op_write(place.cells, op))
        self.words[place.lanes, place.columns] = values
        self.valid[place.lanes, place.columns] = True

    def refuse(self, what: str, place: Places, conflict: Conflict | None) -> None:
        """Raise the race of an access, if it has one."""
        if conflict is not None:
            span, name = f"{place.columns.min()}..{place.columns.max()}", self.clocks.name(conflict.agent)
            raise Race(f"{what} at columns {span} of tensor memory races with a {conflict.kind} by {name}")


class Places(NamedTuple):
    """Lanes [lanes, 1] by columns of tensor memory, and the cells of the shadow state that they cover."""

    lanes: Array
    columns: Array
    cells: Array


def places(lanes: Array, columns: Array) -> Places:
    cells = (np.unique(lanes // CELL_LANES)[:, None] * COLUMNS + columns).ravel()
    return Places(lanes[:, None], columns, cells)


def split_address(address: int) -> tuple[int, int]:
    """(lane, column)"""
    return address >> LANE_SHIFT, address & ((1 << LANE_SHIFT) - 1)
