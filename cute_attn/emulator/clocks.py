"""Vector clocks: the events that happen before each warp's and each asynchronous operation's next access.

Agents of one cluster share a clock space: warps first, then *channels* for asynchronous operations. A channel is reused
only by an issuer that has observed the completion of its last operation, so that having observed epoch e of a channel
implies having observed all earlier ones. Agent 0 stands for the launches before this one (programmatic dependent
launch).

Every clock has two rows. `ORDER` is happens-before; `PROXY` is the part of it that a proxy fence has extended to the
async proxy: an asynchronous operation may read a generic write of epoch e if its PROXY row has reached e.

Clocks of kernels that use tensor memory have two more. `TMEM` is what the tcgen05 operations of a warp are ordered
after: its own operations that it has waited for, and what tcgen05.fence::after_thread_sync adds. `FENCED` is what the
warp's synchronisation publishes of it, since the last fence::before_thread_sync. A barrier hands on FENCED, not TMEM:

    mma -> commit -> (FENCED) mbarrier -> fence::after (TMEM) -> ld -> wait::ld (TMEM) -> fence::before (FENCED) -> ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.errors import EmulatorError

ORDER, PROXY, FENCED, TMEM = range(4)
BEFORE = 0  # agent of earlier launches
BLOCK_SHIFT = 8  # a block of shadow state is 256 cells, 1 KB
CHANNELS = 1024  # three tiles of K and V with one TMA box per token take 768


@dataclass
class Op:
    """Asynchronous operation, or a group of them that completes as one."""

    agent: int
    epoch: int
    clock: Array  # [rows, agents]
    what: str
    time: float = 0.0
    generic: bool = False  # it uses the generic proxy, as cp.async does


class Clocks:
    """Clocks of the warps of one cluster. Row 0 of `v` is unused: agent 0 is no warp."""

    def __init__(self, warps: int, dependent: bool, tensor_memory: bool = False) -> None:
        self.warps = warps
        self.capacity = 1 + warps + CHANNELS
        self.rows = 4 if tensor_memory else 2
        self.tensor_row = TMEM if tensor_memory else ORDER  # orders accesses to tensor memory
        self.v = np.zeros((1 + warps, self.rows, self.capacity), np.int32)
        agents = np.arange(1, 1 + warps)
        self.v[agents, ORDER, agents] = 1
        if not dependent:
            self.v[:, :, BEFORE] = 1
        self.latest = np.zeros(self.capacity, np.int32)
        self.used = 1 + warps
        self.names: dict[int, str] = {}
        self.time = np.zeros(1 + warps)  # virtual, in warp instructions: joins as clocks do

    def zero(self) -> Array:
        return np.zeros((self.rows, self.capacity), np.int32)

    def release(self, agents: Array) -> Array:
        """Joint clock of these warps. It does not cover what they do from now on."""
        joint: Array = self.v[agents].max(axis=0)
        self.go_on(agents)
        return joint

    def go_on(self, agents: Array | int) -> None:
        """Begin new epochs of these warps: what they do from now on."""
        self.v[agents, ORDER, agents] += 1

    def acquire(self, agents: Array, clock: Array, rows: slice = slice(TMEM)) -> None:
        """Order these warps after `clock`, except for their TMEM rows."""
        self.v[agents, rows] = np.maximum(self.v[agents, rows], clock[rows])

    def tensor_fence(self, agents: Array, row: int) -> None:
        """Apply tcgen05.fence::before_thread_sync (FENCED) or ::after_thread_sync (TMEM)."""
        if self.rows > TMEM:
            self.v[agents, row] = np.maximum(self.v[agents, FENCED], self.v[agents, TMEM])

    def proxy_fence(self, agents: Array) -> None:
        """Extend to the async proxy what these warps have observed and done, but not what they do from now on."""
        self.v[agents, PROXY] = self.v[agents, ORDER]
        self.go_on(agents)

    def init_fence(self, agents: Array) -> None:
        """Make these warps' own writes so far visible to the async proxy."""
        self.v[agents, PROXY, agents] = self.v[agents, ORDER, agents]
        self.go_on(agents)

    def grid_wait(self, agents: Array) -> None:
        """Order these warps after the launches before this one."""
        self.v[agents, :, BEFORE] = 1

    def begin(self, agent: int, what: str, generic: bool = False) -> Op:
        """Begin an operation that is ordered after everything that warp `agent` has observed and done so far. A warp
        that waits for a `generic` one must still fence before the async proxy may see its writes.
        """
        seen = self.v[agent, ORDER]
        free = np.flatnonzero(seen[1 + self.warps : self.used] >= self.latest[1 + self.warps : self.used])
        if len(free):
            channel = int(free[0]) + 1 + self.warps
        else:
            channel = self.used
            self.used += 1
            if channel >= self.capacity:
                raise EmulatorError(f"more than {CHANNELS} asynchronous operations that no warp has waited for")
        self.latest[channel] += 1
        clock = self.v[agent].copy()
        epoch = int(self.latest[channel])
        clock[ORDER, channel] = epoch
        if not generic:
            clock[PROXY, channel] = epoch
        self.go_on(agent)
        self.names[channel] = what
        return Op(channel, epoch, clock, what, float(self.time[agent]), generic)

    def name(self, agent: int) -> str:
        if agent == BEFORE:
            return "an earlier launch (before griddepcontrol.wait)"
        if agent <= self.warps:
            return f"warp {agent - 1}"
        return self.names.get(agent, f"operation {agent}")


class Conflict(NamedTuple):
    """Access that another one is not ordered after: a "read" or "write" of `agent`, or a write that no "proxy" fence
    has extended to the async proxy; the position of the word that meets it, if words have warps of their own.
    """

    kind: str
    agent: int
    position: int | None = None


class Shadow:
    """Shadow state of a memory: last writer and readers of every 4-byte cell. `row` of the clocks orders accesses.

    A writer that has observed an agent's last read of a block of cells has observed each of its reads there, and
    whoever observes the write has too: only the other readers are compared cell by cell, and only their reads are
    forgotten. What records an access returns a conflict, if it has one.
    """

    def __init__(self, nbytes: int, clocks: Clocks, row: int = ORDER) -> None:
        cells = (nbytes + 3) // 4
        self.clocks, self.row = clocks, row
        self.writer = np.zeros(cells, np.int32)
        self.written = np.zeros(cells, np.int32)  # epoch; 0: never
        self.generic = np.zeros(cells, np.bool_)  # the last write went through the generic proxy
        self.warp_reads = np.zeros((1 + clocks.warps, cells), np.int32)  # epochs by warp
        self.reads: dict[int, Array] = dict(enumerate(self.warp_reads))  # by agent: those of operations are added
        self.updates: Array | None = None  # epochs of atomic updates by warp, from the first one on
        # Epoch of each agent's last read in a block; 0: none.
        self.last_read = np.zeros(((cells >> BLOCK_SHIFT) + 1, clocks.capacity), np.int32)

    def read(self, cells: Array, agents: Array) -> Conflict | None:
        """Record generic reads, row i of `cells` by warp agents[i].

        No row may cross a block, as no aligned word does: the block of its first cell stands for all of them.
        """
        order = self.clocks.v[:, ORDER]
        writer = self.writer[cells]
        rows = agents[:, None]
        late = self.written[cells] > order[rows, writer]
        now = order[agents, agents]
        self.warp_reads[rows, cells] = now[:, None]
        self.last_read[cells[:, 0] >> BLOCK_SHIFT, agents] = now
        return _written(late, writer) or self._updated(cells, order[agents])

    def write(self, cells: Array, agents: Array) -> Conflict | None:
        """Record generic writes by warps."""
        order = self.clocks.v[:, ORDER]
        rows = agents[:, None]
        conflict = self._accessed(cells, agents, forget=True) or self._updated(cells, order[agents])
        if conflict is not None:
            return conflict
        if self.updates is not None:
            self.updates[:, cells] = 0
        self.writer[cells] = rows
        if agents.min() < agents.max():
            last = self.writer[cells]  # another warp of the batch wrote it in the same instruction
            if some(last != rows):
                return _written(last != rows, last)
        self.written[cells] = order[agents, agents][:, None]
        self.generic[cells] = True
        return None

    def update(self, cells: Array, agents: Array) -> Conflict | None:
        """Record atomic updates by warps, which are not ordered among one another."""
        if self.updates is None:
            self.updates = np.zeros_like(self.warp_reads)
        conflict = self._accessed(cells, agents, forget=False)
        if conflict is None:
            self.updates[agents[:, None], cells] = self.clocks.v[agents, ORDER, agents][:, None]
        return conflict

    def _accessed(self, cells: Array, agents: Array, forget: bool) -> Conflict | None:
        """The write or the read that warps, which change row i of `cells`, are not ordered after."""
        order, rows, writer = self.clocks.v[:, ORDER], agents[:, None], self.writer[cells]
        late = _written(self.written[cells] > order[rows, writer], writer)
        if late is not None:
            return late
        for reader in self._unobserved(order[np.flatnonzero(np.bincount(agents))], cells):
            ahead = self.reads[reader][cells] > order[rows, reader]
            if some(ahead):
                return Conflict("read", reader, int(np.argwhere(ahead)[0][0]))
            if forget:
                self.reads[reader][cells] = 0
        return None

    def _updated(self, cells: Array, clocks: Array) -> Conflict | None:
        """The atomic update of row i of `cells` that clock i has not observed."""
        if self.updates is None:
            return None
        late = self.updates[:, cells] > clocks.T[: len(self.updates), :, None]
        if not some(late):
            return None
        agent, row, _ = np.argwhere(late)[0]
        return Conflict("write", int(agent), int(row))

    def op_read(self, cells: Array, op: Op) -> Conflict | None:
        """Record a read through the async proxy."""
        writer, written = self.writer[cells], self.written[cells]
        late = written > op.clock[self.row, writer]
        if some(late):
            return Conflict("write", int(writer[late][0]))
        unfenced = self.generic[cells] & (written > op.clock[PROXY, writer])
        if some(unfenced):
            return Conflict("proxy", int(writer[unfenced][0]))
        if op.agent not in self.reads:
            self.reads[op.agent] = np.zeros(len(self.written), np.int32)
        self.reads[op.agent][cells] = op.epoch
        last = self.last_read[_blocks(cells), op.agent]
        np.maximum(last, op.epoch, out=last)
        conflict = self._updated(cells[None], op.clock[self.row][None])
        if conflict is None and (conflict := self._updated(cells[None], op.clock[PROXY][None])):
            conflict = conflict._replace(kind="proxy")
        return conflict

    def op_write(self, cells: Array, op: Op) -> Conflict | None:
        """Record a write by an asynchronous operation."""
        writer = self.writer[cells]
        late = self.written[cells] > op.clock[self.row, writer]
        if some(late):
            return Conflict("write", int(writer[late][0]))
        for reader in self._unobserved(op.clock[self.row][None], cells):
            if self.reads[reader][cells].max() > op.clock[self.row, reader]:
                return Conflict("read", reader)
            self.reads[reader][cells] = 0
        self.writer[cells] = op.agent
        self.written[cells] = op.epoch
        self.generic[cells] = op.generic
        return self._updated(cells[None], op.clock[self.row][None])

    def _unobserved(self, clocks: Array, cells: Array) -> list[int]:
        """The agents whose last read of the blocks of these cells one of the clocks has not observed."""
        used = self.clocks.used
        last = self.last_read[_blocks(cells), :used].max(axis=0, initial=0)
        return np.flatnonzero(last > clocks[:, :used].min(axis=0)).tolist()


def _blocks(cells: Array) -> slice:
    """The blocks between the first and the last of these cells."""
    if len(cells) == 0:
        return slice(0)
    return slice(int(cells.min()) >> BLOCK_SHIFT, (int(cells.max()) >> BLOCK_SHIFT) + 1)


def _written(late: Array, writer: Array) -> Conflict | None:
    """Conflict with the write of the first late cell, if there is one."""
    if not some(late):
        return None
    row, column = np.argwhere(late)[0]
    return Conflict("write", int(writer[row, column]), int(row))
