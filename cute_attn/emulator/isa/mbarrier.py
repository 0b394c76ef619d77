"""mbarrier: barriers that count arrivals and bytes, in shared memory of any CTA of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_attn.emulator.clocks import FENCED, ORDER, PROXY, TMEM, Clocks, Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import BarrierFault
from cute_attn.emulator.isa import order
from cute_attn.emulator.isa.barriers import on_clocks
from cute_attn.emulator.isa.copies import outstanding
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.memory import MBARRIER, OFFSET_MASK, RANK_SHIFT, SharedMemory
from cute_attn.emulator.warp_batch import WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

MAX_COUNT = (1 << 20) - 1  # of arrivals, and of bytes
_SPACE = "{|.shared|.shared::cta|.shared::cluster}"
_ANYWHERE = ("", ".shared::cluster")  # spaces with addresses of other CTAs of the cluster
_SEM = "{|.release|.relaxed}{|.cta|.cluster}"


@dataclass
class Remote:
    """Use of a barrier by another CTA: by warp `agent` at its epoch, or (0) by an asynchronous operation. `phase`: the
    one that it belongs to, once it has arrived. `in_order`: operations of its channel arrive one after another.
    """

    what: str
    op: Op | None = None
    in_order: bool = False
    agent: int = 0
    epoch: int = 0
    phase: int | None = None


class Mbarrier:
    """State of one mbarrier. `phase` counts completed phases."""

    def __init__(self, cta: Cta, count: int, agent: int, name: str) -> None:
        self.cta, self.cluster, self.count, self.name = cta, cta.cluster, count, name
        cluster = cta.cluster
        self.pending, self.tx, self.phase = count, 0, 0
        self.time, self.done_time = 0.0, 0.0
        self.agents: set[int] = set()  # warps that have arrived
        self.arrivals: dict[int, int] = {}  # in this phase, by agent
        self.last: dict[int, int] = {}  # in the phase before
        self.remote: list[Remote] = []  # uses by other CTAs in phases that no warp has seen complete
        self.clock, self.done = cluster.clocks.zero(), cluster.clocks.zero()
        self.made_by, self.made_at = agent, int(cluster.clocks.v[agent, ORDER, agent])

    def seen(self, agent: int) -> None:
        """Check that the initialisation happens before a use by warp `agent`."""
        if self.cluster.grid.checks and self.cluster.clocks.v[agent, ORDER, self.made_by] < self.made_at:
            raise BarrierFault(f"{self.name} is used before its initialisation is visible to the warp")

    def used_by(self, cta: Cta, what: str, op: Op | None = None, in_order: bool = False, agent: int = 0) -> None:
        """Record a use by a CTA, which must come before the end of the barrier's own CTA. `op` has yet to arrive."""
        if cta is self.cta or not self.cluster.grid.checks:
            return
        what = f"{what} of CTA {cta.index}"
        if not self.cta.running:
            raise BarrierFault(f"{what} at {self.name} of CTA {self.cta.index}, which has ended")
        if op is not None:
            self.remote.append(Remote(what, op, in_order))
        else:
            epoch = int(self.cluster.clocks.v[agent, ORDER, agent])
            self.remote.append(Remote(what, agent=agent, epoch=epoch, phase=self.phase))

    def _handed_on(self, sem: str) -> slice:
        """Rows of clocks that an arrival or a wait hands on. A relaxed one orders tensor memory alone."""
        return slice(FENCED if sem == ".relaxed" and not self.cluster.lax else ORDER, TMEM)

    def arrive(self, agent: int, count: int, expect: int = 0, sem: str = "") -> None:
        self.seen(agent)
        rows = self._handed_on(sem)
        self.clock[rows] = np.maximum(self.clock[rows], self.cluster.clocks.v[agent, rows])
        self.time = max(self.time, float(self.cluster.clocks.time[agent]))
        self.agents.add(agent)
        self.tx += expect
        if self.tx > MAX_COUNT:
            raise BarrierFault(f"{self.name}: transaction count {self.tx} is out of range")
        self._count(count, agent)

    def arrive_by(self, op: Op, latency: float) -> None:
        """Arrive on behalf of an asynchronous operation that has ended."""
        self._join(op, latency)
        self._count(1, op.agent)

    def _join(self, op: Op, latency: float) -> None:
        if self.cluster.grid.checks and op.clock[PROXY, self.made_by] < self.made_at:
            raise BarrierFault(
                f"{self.name} is used by {op.what}, to which its initialisation is not visible: "
                "fence.mbarrier_init or fence.proxy.async is missing"
            )
        np.maximum(self.clock, op.clock, out=self.clock)
        coming = next((use for use in self.remote if use.op is op and use.phase is None), None)
        if coming is not None:
            coming.phase = self.phase
        self.time = max(self.time, op.time + latency)

    def _count(self, count: int, agent: int) -> None:
        if count > self.pending:
            raise BarrierFault(f"{self.name}: {count} arrivals where {self.pending} of {self.count} are pending")
        self.pending -= count
        self.arrivals[agent] = self.arrivals.get(agent, 0) + count
        self.advance()

    def complete(self, num_bytes: int, op: Op, latency: float = 0.0) -> None:
        """Count bytes of an asynchronous operation that have arrived."""
        self._join(op, latency)
        self.tx -= num_bytes
        self.advance()

    def advance(self) -> None:
        if self.pending or self.tx:
            return
        self.phase += 1
        self.pending = self.count
        self.last, self.arrivals = self.arrivals, {}
        self.done_time = self.time
        np.maximum(self.done, self.clock, out=self.done)

    def unbalanced(self) -> bool:
        """Whether the phase has a begin that phases of this barrier do not have, or bytes that nobody announced.

        Kernels that are right end in the middle of a phase, too: one role arrives ahead of another that has no work
        left, and tails of producers announce bytes that they do not send (CUTLASS's `producer_tail`).
        """
        strange = any(self.last.get(agent) != count for agent, count in self.arrivals.items())
        return self.tx < 0 or (strange and self.phase > 0)

    def pass_(self, agents: Array, sem: str) -> None:
        """Order these warps after the completed phase that they have observed."""
        clocks = self.cluster.clocks
        self._see()
        clocks.time[agents] = np.maximum(clocks.time[agents], self.done_time)
        rows = self._handed_on(sem)
        clocks.acquire(agents, self.done, rows)
        if self.cluster.cross and rows.start == ORDER:
            order.share(self.cluster, np.unique(np.concatenate([agents, np.array(sorted(self.agents), np.int64)])))

    def _see(self) -> None:
        """Forget the uses by other CTAs in phases that a warp has seen complete, but for the latest in an order."""
        latest = self.cta.unit("seen of other CTAs", dict[int, int])
        for use in self.remote:
            if use.in_order and use.op is not None and use.phase is not None and use.phase < self.phase:
                latest[use.op.agent] = max(use.op.epoch, latest.get(use.op.agent, 0))
        self.remote = [use for use in self.remote if use.phase is None or use.phase >= self.phase]


def at(cta: Cta, address: int, cluster: bool = False) -> Mbarrier:
    """Look up the barrier at a shared address."""
    rank, offset = address >> RANK_SHIFT, address & OFFSET_MASK
    if rank != cta.rank and not cluster:
        raise BarrierFault(f"mbarrier at {address:#x} is not in shared memory of the CTA")
    if rank >= len(cta.cluster.ctas):
        raise BarrierFault(f"mbarrier at {address:#x}: no CTA of rank {rank}")
    found = cta.cluster.ctas[rank].mbarriers.get(offset)
    if found is None:
        raise BarrierFault(f"no mbarrier was initialised at shared {offset:#x}")
    return found


def target(cta: Cta, address: int, op: Op, what: str, in_order: bool = False) -> Mbarrier:
    """Look up the barrier at which an operation that `cta` has issued will arrive, in any CTA of the cluster."""
    barrier = at(cta, address, cluster=True)
    barrier.used_by(cta, what, op, in_order)
    return barrier


def deliver(
    memory: SharedMemory, offsets: Array, words: Array, op: Op, what: str, barrier: Mbarrier, latency: float = 0.0
) -> None:
    """Write what an asynchronous operation brings, and count its bytes at a barrier."""
    memory.check(offsets, words.itemsize, what)
    memory.store(offsets, words, op, what)
    barrier.complete(words.nbytes, op, latency)


# --- life of a barrier ------------------------------------------------------------------------------------------------


@called("mbarrier.init{|.shared|.shared::cta}.b64", operands="[] u4")
def init(w: WarpBatch, mask: Array | None, address: Array, count: Array) -> None:
    for lane, where, number in w.each(mask, address & OFFSET_MASK, count):
        w.cta.smem.check(np.array([where]), 8, "mbarrier.init")
        if not 1 <= number <= MAX_COUNT:
            raise BarrierFault(f"mbarrier.init with a count of {number}", lane)
        agents = w.lane_agents[lane : lane + 1]
        w.cta.smem.store(np.array([where]), np.zeros(1, np.uint64), agents, "mbarrier.init")
        w.cta.smem.valid.data[where : where + 8] = MBARRIER
        w.cta.unit("ends of mbarriers", lambda: w.cta, _check_end)
        w.cta.mbarriers[where] = Mbarrier(w.cta, number, int(agents[0]), f"mbarrier at shared {where:#x}")


def _check_end(cta: Cta) -> None:
    """Check that no barrier is left with arrivals or bytes that do not belong to its phase: its count is wrong. While
    asynchronous work is pending, its arrivals are still to come.
    """
    if not cta.grid.checks:
        return
    for barrier in cta.mbarriers.values():
        if not cta.pending and barrier.unbalanced():
            came = barrier.count - barrier.pending
            raise BarrierFault(
                f"CTA {cta.index} ends in the middle of a phase: {barrier.name} has {came} of {barrier.count} arrivals "
                f"and {barrier.tx} bytes are missing in phase {barrier.phase}"
            )
    _check_remote(cta)


def _check_remote(cta: Cta) -> None:
    """Check that what other CTAs do at barriers of this one comes before its end, on every schedule: a warp of it has
    seen the phase complete, or that of a later commit of the same thread. Arrivals of warps need only happen before.
    """
    seen = cta.clocks.v[cta.first_agent : cta.first_agent + cta.num_warps, ORDER].max(axis=0)
    latest = cta.unit("seen of other CTAs", dict[int, int])
    for barrier in cta.mbarriers.values():
        for use in barrier.remote:
            if use.op is None:
                before = seen[use.agent] >= use.epoch
            else:
                before = use.in_order and latest.get(use.op.agent, 0) >= use.op.epoch
            if not before:
                raise BarrierFault(
                    f"CTA {cta.index} may end before {use.what} at {barrier.name}: none of its warps has waited for "
                    f"phase {barrier.phase if use.phase is None else use.phase}"
                )


# --- arrivals ---------------------------------------------------------------------------------------------------------


_go_on = on_clocks(Clocks.go_on)


def _arrivals(
    w: WarpBatch, mask: Array | None, address: Array, numbers: Array, cluster: bool = False
) -> Iterator[tuple[int, int, Mbarrier, int]]:
    """The lanes that arrive: position, agent, barrier and number. Those of a warp must arrive in the same phase."""
    first: dict[tuple[int, int], int] = {}  # phase by warp and barrier
    for lane, where, number in w.each(mask, address, numbers):
        barrier, agent = at(w.cta, where, cluster), int(w.lane_agents[lane])
        phase = first.setdefault((agent, id(barrier)), barrier.phase)
        if phase != barrier.phase:
            raise BarrierFault(
                f"{barrier.name}: lanes of one warp arrive in phases {phase} and {barrier.phase}, "
                f"its count of {barrier.count} is too low",
                int(w.lane[lane]),
            )
        yield lane, agent, barrier, number


_ARRIVE: dict[str, Any] = {"operands": "$0 $1 $3 [] u4=1", "results": "u8"}


@called(f"mbarrier.arrive{{}}{_SEM}{_SPACE}.b64", **_ARRIVE)
@called(f"mbarrier.arrive{{.expect_tx}}{_SEM}{_SPACE}.b64", since=90, **_ARRIVE)
def arrive(
    w: WarpBatch, mask: Array | None, expect: str, sem: str, space: str, address: Array, numbers: Array
) -> Array:
    """Arrive with a count, or once with expected bytes. The token is 0: tests are by parity."""
    for _, agent, barrier, number in _arrivals(w, mask, address, numbers, space in _ANYWHERE):
        barrier.used_by(w.cta, "an arrival", agent=agent)
        barrier.arrive(agent, *((1, number) if expect else (number, 0)), sem)
    _go_on(w, mask)
    return np.zeros(1, np.uint64)


@called("cp.async.mbarrier.arrive.noinc{|.shared|.shared::cta}.b64", operands="[]")
def copies_arrive(w: WarpBatch, mask: Array | None, address: Array) -> None:
    """Arrive for each lane once its copies so far have landed."""
    copies = {}
    for row in np.unique(w.row[w.lanes(mask)]):
        ops = outstanding(w, int(row))
        copies[int(row)] = np.maximum.reduce([op.clock for op in ops]) if ops else None
    for lane, agent, barrier, _ in _arrivals(w, mask, address, np.ones(1, np.uint32)):
        barrier.seen(agent)
        landed = copies[int(w.row[lane])]
        if landed is not None:
            np.maximum(barrier.clock, landed, out=barrier.clock)
        barrier.arrive(agent, 1)
    _go_on(w, mask)


# --- tests ------------------------------------------------------------------------------------------------------------


_ACQUIRE = "{|.acquire|.relaxed}{|.cta|.cluster}"


@called(f"mbarrier.{{test_wait|try_wait}}.parity{_ACQUIRE}{_SPACE}.b64", operands="$1 [] u4 ?", results="p", solo=True)
def wait(w: WarpBatch, mask: Array | None, sem: str, address: Array, expected: Array) -> Array:
    clocks = w.cta.clocks
    since, w.spin_since = w.spin_since, None
    if since is not None:
        clocks.time[w.agents] = since  # the time of a waiting loop is that of what it waits for
    done = np.zeros(w.size, np.bool_)
    for where, want, some, agents in _tests(w, mask, address, expected):
        barrier = at(w.cta, where)
        for agent in agents:
            barrier.seen(int(agent))
        if (barrier.phase & 1) != (want & 1):
            barrier.pass_(agents, sem)
            w.passed = barrier.name
            done[some] = True
        else:
            w.spin_since = float(clocks.time[w.agents].max())
            w.spinning = (
                f"{barrier.name}, parity {want} "
                f"({barrier.pending} of {barrier.count} arrivals and {barrier.tx} bytes missing)"
            )
    return done


def _tests(
    w: WarpBatch, mask: Array | None, address: Array, expected: Array
) -> Iterator[tuple[int, int, Array, Array]]:
    """The tests that the lanes make, each once: address, expected parity, lanes, agents."""
    if len(address) == 1 and len(expected) == 1:
        yield int(address[0]), int(expected[0]), w.lanes(mask), w.active_agents(mask)
        return
    lanes = w.lanes(mask)
    where, wanted = w.full(address)[lanes], w.full(expected)[lanes]
    keys = where.astype(np.uint64) << np.uint64(32) | (wanted.astype(np.uint64) & np.uint64(0xFFFFFFFF))
    first = keys[0]
    for key in [first] if (keys == first).all() else np.unique(keys):
        same = keys == key
        some = lanes[same]
        yield int(where[same][0]), int(wanted[same][0]), some, np.unique(w.lane_agents[some])


# --- fences -----------------------------------------------------------------------------------------------------------


called("fence.mbarrier_init.release.cluster", since=90)(on_clocks(Clocks.init_fence))
