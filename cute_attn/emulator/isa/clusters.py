"""Cluster instructions: mapa, barrier.cluster, st.async; clusterlaunchcontrol, by which a running cluster takes over
the work of one that has not started."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import BarrierFault, Race
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.barriers import Meeting
from cute_attn.emulator.isa.registry import called, computed
from cute_attn.emulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.warp_batch import WarpBatch

LATENCY = 400  # of virtual time, for the timeline: of clusterlaunchcontrol

# The address of a CTA that does not exist is an error only when it is used.
_MAPPED = f"{{0}} & u4.type({OFFSET_MASK}) | {{1}} << u4.type({RANK_SHIFT})"
computed({"mapa{|.shared::cluster}.u32": _MAPPED}, since=90)


_MEETING: dict[str, Any] = {"since": 90, "solo": True}


@called("barrier.cluster.arrive{|.release|.relaxed}{|.aligned}", aligned="barrier.cluster.arrive", **_MEETING)
def arrive(w: WarpBatch, mask: Array | None) -> None:
    cluster = w.cta.cluster
    if cluster.barrier is None:
        total = len(cluster.ctas) * w.cta.num_warps
        cluster.barrier = Meeting(cluster, total, "barrier.cluster")
    meeting: Meeting = cluster.barrier
    agents = w.active_agents(mask)
    arrived = w.cta.unit("cluster arrivals", dict[int, Meeting])
    for agent in agents:
        if int(agent) in arrived:
            raise BarrierFault("barrier.cluster.arrive twice without a wait")
        arrived[int(agent)] = meeting
    meeting.arrive(agents)
    if meeting.complete:
        cluster.barrier = None
        meeting.release()
        meeting.arrived = -1


@called("barrier.cluster.wait{|.acquire}{|.aligned}", aligned="barrier.cluster.wait", **_MEETING)
def wait(w: WarpBatch, mask: Array | None) -> None:
    agents = w.active_agents(mask)
    arrived = w.cta.unit("cluster arrivals", dict[int, Meeting])
    if not all(int(agent) in arrived for agent in agents):
        raise BarrierFault("barrier.cluster.wait without an arrive before it")
    meeting, *_ = [arrived.pop(int(agent)) for agent in agents]
    if meeting.arrived == -1:  # already complete
        w.cta.clocks.acquire(agents, meeting.clock)
        return
    w.wait = meeting.wait(agents)


@called(
    "st.async{|.weak}.shared::cluster.mbarrier::complete_tx::bytes{|.v2|.v4}{.b32|.u32|.s32|.f32|.b64|.u64|.s64|.f64}",
    operands="[u4] {.} [u4]",
    since=90,
)
def st_async(w: WarpBatch, mask: Array | None, target: Array, values: tuple[Array, ...], barrier: Array) -> None:
    """One operation for all lanes of a warp that count at the same barrier: their clocks are equal."""
    targets, barriers = w.full(target), w.full(barrier)
    data = np.ascontiguousarray(np.stack([w.full(v) for v in values], axis=1)).view(np.uint8)
    for group in _groups(np.asarray(w.lanes(mask)), targets >> RANK_SHIFT, barriers, w.row):
        rank, where = int(targets[group[0]]) >> RANK_SHIFT, targets[group] & OFFSET_MASK
        memory = w.cta.cluster.ctas[rank].smem
        if len(np.unique(where)) < len(where):
            raise Race("lanes of one st.async store to the same place")
        op = w.begin_op(int(w.row[group[0]]), "st.async")
        waiting = mbarrier.target(w.cta, int(barriers[group[0]]), op, "st.async")
        mbarrier.deliver(memory, where, access.words_of(data[group]), op, "st.async", waiting)


def _groups(lanes: Array, *keys: Array) -> Iterator[Array]:
    """Lanes by equal keys."""
    found = np.unique(np.stack([key[lanes] for key in keys]), axis=1, return_inverse=True)[1].reshape(-1)
    return (lanes[found == i] for i in range(found.max(initial=-1) + 1))


# --- clusterlaunchcontrol ---------------------------------------------------------------------------------------------


@called(
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128",
    operands="[] []",
    since=100,
)
def try_cancel(w: WarpBatch, mask: Array | None, address: Array, barrier: Array) -> None:
    """Write the response to each CTA, opaque to programs: coordinates of the first CTA, and whether there is one."""
    for lane, at, bar in w.each(mask, address & OFFSET_MASK, barrier & OFFSET_MASK):
        origin = w.cta.grid.cancel()
        response = np.array([*origin, 1] if origin is not None else [0, 0, 0, 0], np.uint32).view("V16")
        op = w.begin_op(int(w.row[lane]), "clusterlaunchcontrol.try_cancel")
        for cta in w.cta.cluster.ctas:
            waiting = mbarrier.target(w.cta, cta.rank << RANK_SHIFT | bar, op, "clusterlaunchcontrol.try_cancel")
            where = cta.smem, np.array([at])
            w.cta.post(functools.partial(mbarrier.deliver, *where, response, op, "try_cancel", waiting, LATENCY))


_QUERY = "clusterlaunchcontrol.query_cancel"
_WORD = "np.ascontiguousarray({{0}}).view(u4).reshape(-1, 4)[:, {}].copy()"
computed(
    {f"{_QUERY}.get_first_ctaid::{axis}.b32.b128": _WORD.format(i) for i, axis in enumerate("xyz")}
    | {f"{_QUERY}.is_canceled.pred.b128": f"{_WORD.format(3)} != 0"},
    kinds={"results": "^"},
    since=100,
)
