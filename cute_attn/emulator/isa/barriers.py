"""Named barriers, proxy fences, griddepcontrol."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator.clocks import Clocks
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import BarrierFault, PtxError
from cute_attn.emulator.isa import order
from cute_attn.emulator.isa.registry import called, form
from cute_attn.emulator.ptx import Inst, Not, Reg
from cute_attn.emulator.warp_batch import Wait, WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cluster, Cta


# --- named barriers ---------------------------------------------------------------------------------------------------


class Meeting:
    """One phase of a named barrier or of a cluster barrier: the warps that have arrived and those that wait."""

    def __init__(self, cluster: Cluster, expected: int, what: str) -> None:
        self.cluster, self.expected, self.what = cluster, expected, what
        self.arrived = 0
        self.clock = cluster.clocks.zero()
        self.time = 0.0
        self.agents: list[Array] = []
        self.waiting: list[tuple[Wait, Array]] = []
        self.votes: list[tuple[bool, bool]] = []  # of a reducing barrier: (any, all) over the lanes of each arrival
        self.some = self.every = False

    def arrive(self, agents: Array) -> None:
        self.arrived += len(agents)
        self.agents.append(agents)
        clocks = self.cluster.clocks
        np.maximum(self.clock, clocks.release(agents), out=self.clock)
        self.time = max(self.time, float(clocks.time[agents].max()))

    def wait(self, agents: Array, ready: Callable[[], bool] | None = None) -> Wait:
        waiting = Wait(self.what, ready)
        self.waiting.append((waiting, agents))
        return waiting

    @property
    def complete(self) -> bool:
        return self.arrived == self.expected

    def release(self) -> None:
        self.some = any(vote for vote, _ in self.votes)
        self.every = all(vote for _, vote in self.votes)
        clocks = self.cluster.clocks
        order.share(self.cluster, np.concatenate(self.agents))
        for waiting, agents in self.waiting:
            waiting.done = True
            clocks.acquire(agents, self.clock)
            clocks.time[agents] = np.maximum(clocks.time[agents], self.time)


@called("{bar|barrier}{|.cta}{.sync|.arrive}{|.aligned}", operands="$2 u4 u4=None", solo=True, aligned="bar.sync")
def bar(w: WarpBatch, mask: Array | None, how: str, number: Array, threads: Array | None) -> None:
    index, meeting, agents = _meeting(w, mask, number, threads)
    meeting.arrive(agents)
    if how == ".sync":
        w.wait = meeting.wait(agents)
    _finish(w.cta, index, meeting)


@form("{bar|barrier}{|.cta}.red{.and|.or}{|.aligned}.pred", solo=True, aligned="bar.sync")
def bar_red(e: Emitter, inst: Inst, *choices: str) -> None:
    result, number, *count, p = inst.operands
    if not isinstance(result, Reg) or not isinstance(p, Reg | Not):
        raise PtxError("a reducing barrier takes predicates")
    threads = e.get(count[0], "u4") if count else "None"
    arguments = [e.get(number, "u4"), threads, e.get(p, "p"), str(".or" in choices), str(result.index)]
    e.call(_bar_red, arguments)


def _bar_red(
    w: WarpBatch, mask: Array | None, number: Array, threads: Array | None, p: Array, any_of: bool, index: int
) -> None:
    name, meeting, agents = _meeting(w, mask, number, threads)
    said = w.full(p)[w.lanes(mask)]
    meeting.votes.append((bool(said.any()), bool(said.all())))
    meeting.arrive(agents)

    def settled() -> bool:
        """Write the reduction to the predicate of the batch, which waits."""
        if verdict.done:
            value = np.array([meeting.some if any_of else meeting.every])
            w.R[index] = value if mask is None else np.where(mask, value, w.R[index])
        return verdict.done

    w.wait = verdict = meeting.wait(agents, settled)
    _finish(w.cta, name, meeting)


def _meeting(w: WarpBatch, mask: Array | None, number: Array, threads: Array | None) -> tuple[int, Meeting, Array]:
    index = w.uniform(number, mask, "barrier number")
    expected = w.cta.num_warps if threads is None else w.uniform(threads, mask, "barrier thread count")
    if threads is not None:
        if expected % 32 or expected == 0:
            raise BarrierFault(f"barrier {index}: {expected} threads is no multiple of a warp")
        expected //= 32
    if not 0 <= index < 16:
        raise BarrierFault(f"barrier {index}: there are 16")
    meeting = w.cta.barriers.get(index)
    if meeting is None:
        meeting = w.cta.barriers[index] = Meeting(w.cta.cluster, expected, f"barrier {index}")
    if meeting.expected != expected:
        raise BarrierFault(f"barrier {index}: {32 * expected} threads expected here, {32 * meeting.expected} before")
    agents = w.active_agents(mask)
    if meeting.arrived + len(agents) > expected:
        raise BarrierFault(f"barrier {index}: more than {32 * expected} threads arrive")
    meeting.what = f"barrier {index} ({meeting.arrived + len(agents)} of {expected} warps)"
    return index, meeting, agents


def _finish(cta: Cta, index: int, meeting: Meeting) -> None:
    if meeting.complete:
        del cta.barriers[index]
        meeting.release()


# --- fences, grid dependencies ----------------------------------------------------------------------------------------


def on_clocks(change: Callable[[Clocks, Array], None]) -> Callable[[WarpBatch, Array | None], None]:
    """What changes the clocks of the warps that have active lanes."""

    def changed(w: WarpBatch, mask: Array | None) -> None:
        change(w.cta.clocks, w.active_agents(mask))

    return changed


called("fence.proxy.async{|.shared::cta|.shared::cluster|.global}", since=90)(on_clocks(Clocks.proxy_fence))
called("griddepcontrol.wait", since=90)(on_clocks(Clocks.grid_wait))
