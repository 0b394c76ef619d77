"""What CTAs of a cluster do together: mapa, barrier.cluster, st.async."""

from __future__ import annotations

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.dtypes import Array, tag
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import BarrierFault, MemoryFault
from cute_attn.emulator.gang import Gang
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.barriers import Meeting
from cute_attn.emulator.isa.mma import whole
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.memory import GENERIC_SHARED, OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.ptx import Inst


@form("mapa{|.shared::cluster}{.u32|.u64}", since=90, golden="cluster")
def mapa(e: Emitter, inst: Inst, space: str, kind: str) -> None:
    d, address, rank = inst.operands
    t = tag(kind)
    e.call(_mapa, [e.get(address, t), e.get(rank, "u4")], [(d, t)])


def _mapa(g: Gang, mask: Array | None, address: Array, rank: Array) -> Array:
    if (g.full(rank)[g.lanes(mask)] >= len(g.cta.cluster.ctas)).any():
        raise MemoryFault("mapa: no such CTA in the cluster")
    wide = address.astype(np.uint64) & np.uint64(OFFSET_MASK)
    mapped = wide | rank.astype(np.uint64) << np.uint64(RANK_SHIFT)
    generic = address.dtype.itemsize == 8 and bool((address >= np.uint64(GENERIC_SHARED)).any())
    found: Array = (mapped | np.uint64(GENERIC_SHARED) if generic else mapped).astype(address.dtype)
    return found


@form("getctarank{|.shared::cluster}{.u32|.u64}", since=90, golden="cluster")
def ctarank(e: Emitter, inst: Inst, space: str, kind: str) -> None:
    d, address = inst.operands
    text = f"({e.get(address, tag(kind))}.astype(u4) >> {e.constant(RANK_SHIFT, 'u4')})"
    e.set(d, "u4", text)


@form("barrier.cluster.arrive{|.release|.relaxed}{|.aligned}", since=90, solo=True, converges=True, golden="cluster")
def arrive(e: Emitter, inst: Inst, *choices: str) -> None:
    e.call(_arrive, [])


def _arrive(g: Gang, mask: Array | None) -> None:
    whole(g, mask, "barrier.cluster.arrive")
    cluster = g.cta.cluster
    if cluster.barrier is None:
        total = len(cluster.ctas) * g.cta.num_warps
        cluster.barrier = Meeting(cluster, total, "barrier.cluster")
    meeting: Meeting = cluster.barrier
    agents = g.agents[g.row[g.first_lanes(mask)]]
    arrived = g.cta.extra.setdefault("cluster arrivals", {})
    for agent in agents:
        if int(agent) in arrived:
            raise BarrierFault("barrier.cluster.arrive twice without a wait")
        arrived[int(agent)] = meeting
    meeting.arrive(agents)
    if meeting.complete:
        cluster.barrier = None
        meeting.release()
        meeting.arrived = -1


@form("barrier.cluster.wait{|.acquire}{|.aligned}", since=90, solo=True, converges=True, golden="cluster")
def wait(e: Emitter, inst: Inst, *choices: str) -> None:
    e.call(_wait, [])


def _wait(g: Gang, mask: Array | None) -> None:
    whole(g, mask, "barrier.cluster.wait")
    agents = g.agents[g.row[g.first_lanes(mask)]]
    arrived = g.cta.extra.setdefault("cluster arrivals", {})
    meetings = [arrived.pop(int(agent), None) for agent in agents]
    if None in meetings:
        raise BarrierFault("barrier.cluster.wait without an arrive before it")
    meeting: Meeting = meetings[0]
    if meeting.arrived == -1:  # already complete
        if g.cta.clocks is not None and meeting.clock is not None:
            g.cta.clocks.acquire(agents, meeting.clock)
        return
    g.wait = meeting.wait(agents)


@form(
    "st.async{|.weak}.shared::cluster.mbarrier::complete_tx::bytes{|.v2|.v4}{.b32|.u32|.s32|.f32|.b64|.u64|.s64|.f64}",
    since=90,
    golden="cluster",
)
def st_async(e: Emitter, inst: Inst, weak: str, vec: str, kind: str) -> None:
    target, source, barrier = inst.operands
    width = f"u{tag(kind)[1]}"
    values = "(" + "".join(f"{e.get(x, width)}, " for x in e.items(source)) + ")"
    e.call(_st_async, [e.address(target, wide=False), values, e.address(barrier, wide=False)])


def _st_async(g: Gang, mask: Array | None, target: Array, values: tuple[Array, ...], barrier: Array) -> None:
    targets, barriers = g.full(target), g.full(barrier)
    rows = np.stack([g.full(v) for v in values], axis=1)
    for lane in g.lanes(mask):
        data = np.ascontiguousarray(rows[lane : lane + 1]).view(np.uint8)
        rank, offset = int(targets[lane]) >> RANK_SHIFT, int(targets[lane]) & OFFSET_MASK
        memory = g.cta.cluster.ctas[rank].smem
        where = np.array([offset])
        memory.check(where, data.shape[1], data.shape[1], "st.async")
        op = g.begin_op(int(g.row[lane]), "st.async")
        memory.op_store(where, access.words_of(data), data.shape[1], op, "st.async", generic=False)
        waiting = mbarrier.at(g.cta, int(barriers[lane]), cluster=True)
        waiting.complete(data.shape[1], op, op.time if op else 0.0)
