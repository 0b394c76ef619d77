"""Happens-before through global memory: a release at an address orders a warp before those that acquire there.

A fence saves the warp's clock; strong writes after it publish that clock, and clocks observed by strong reads are
acquired at the next fence. Epochs of warps of other clusters are kept in a dict, which is empty in most launches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator.access import CLUSTER_SHIFT
from cute_attn.emulator.clocks import FENCED, TMEM
from cute_attn.emulator.dtypes import Array

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cluster
    from cute_attn.emulator.warp_batch import WarpBatch


@dataclass
class Message:
    """Snapshot of a warp at a release: its clock, and its epochs of other clusters."""

    cluster: int
    clock: Array
    cross: dict[int, int]


@dataclass
class HappensBefore:
    """Releases of one grid: by address, the messages released there; by warp, the message of its last fence and the
    messages that it has read since. Of mbarriers with relaxed semantics, by warp: the clock of its last fence of any
    scope (`near`), and that of the phases that it has seen complete since (`relaxed`)."""

    released: dict[int, list[Message]] = field(default_factory=dict)
    fenced: dict[tuple[int, int], Message] = field(default_factory=dict)
    observed: dict[tuple[int, int], list[Message]] = field(default_factory=dict)
    near: dict[tuple[int, int], Array] = field(default_factory=dict)
    relaxed: dict[tuple[int, int], Array] = field(default_factory=dict)


def publish(w: WarpBatch, mask: Array | None, address: Array, release: bool) -> None:
    """Record a strong write by the active lanes. Called after the write."""
    cluster, relation = w.cta.cluster, w.cta.grid.happens_before
    if not cluster.grid.checks:
        return
    for lane, where in w.each(mask, address):
        agent = int(w.lane_agents[lane])
        message = _message(cluster, agent) if release else relation.fenced.get((cluster.number, agent))
        if message is not None:
            relation.released.setdefault(where, []).append(message)


def observe(w: WarpBatch, mask: Array | None, address: Array, acquire: bool) -> None:
    """Record a strong read by the active lanes."""
    cluster, relation = w.cta.cluster, w.cta.grid.happens_before
    if not relation.released:
        return
    for lane, where in w.each(mask, address):
        messages = relation.released.get(where, [])
        agent = int(w.lane_agents[lane])
        if acquire:
            _acquire(cluster, agent, messages)
        elif messages:
            relation.observed.setdefault((cluster.number, agent), []).extend(messages)


def fence(w: WarpBatch, mask: Array | None, scope: str) -> None:
    """Apply fence.acq_rel, fence.sc or membar. Those of a CTA or a cluster only mbarriers hand on."""
    cluster, relation = w.cta.cluster, w.cta.grid.happens_before
    wide = scope in (".gpu", ".sys", ".gl")
    for lane in w.first_lanes(mask):
        agent = int(w.lane_agents[lane])
        warp = cluster.number, agent
        if warp in relation.relaxed:
            cluster.clocks.acquire(np.array([agent]), relation.relaxed.pop(warp))
        if wide:
            _acquire(cluster, agent, relation.observed.pop(warp, []))
            relation.fenced[warp] = _message(cluster, agent)
        relation.near[warp] = relation.fenced[warp].clock if wide else cluster.clocks.release(np.array([agent]))


def published(cluster: Cluster, agent: int, relaxed: bool) -> Array:
    """Clock that an arrival at an mbarrier hands on. A relaxed one: that of the warp's last fence, and what
    tcgen05.fence::before_thread_sync has published.
    """
    clocks = cluster.clocks
    whole: Array = clocks.v[agent]
    if not relaxed or cluster.lax:
        return whole
    found = cluster.grid.happens_before.near.get((cluster.number, agent))
    part = clocks.zero() if found is None else found.copy()
    part[FENCED:TMEM] = np.maximum(part[FENCED:TMEM], whole[FENCED:TMEM])
    return part


def passed(cluster: Cluster, agents: Array, clock: Array) -> None:
    """Order warps after a phase of an mbarrier that they have seen complete with relaxed semantics."""
    clocks = cluster.clocks
    if cluster.lax:
        clocks.acquire(agents, clock)
        return
    clocks.v[agents, FENCED:TMEM] = np.maximum(clocks.v[agents, FENCED:TMEM], clock[FENCED:TMEM])
    relation = cluster.grid.happens_before
    for agent in agents:
        warp = cluster.number, int(agent)
        found = relation.relaxed.get(warp)
        relation.relaxed[warp] = clock.copy() if found is None else np.maximum(found, clock)


def share(cluster: Cluster, agents: Array) -> None:
    """Join, for warps that met at a barrier, the epochs of other clusters that each has observed."""
    if not cluster.cross:
        return
    joint: dict[int, int] = {}
    for agent in agents:
        for key, epoch in cluster.cross.get(int(agent), {}).items():
            joint[key] = max(epoch, joint.get(key, 0))
    for agent in agents:
        cluster.cross[int(agent)] = dict(joint)


def _message(cluster: Cluster, agent: int) -> Message:
    clock = cluster.clocks.release(np.array([agent]))
    return Message(cluster.number, clock, dict(cluster.cross.get(agent, {})))


def _acquire(cluster: Cluster, agent: int, messages: list[Message]) -> None:
    clocks = cluster.clocks
    for message in messages:
        cross = cluster.cross.setdefault(agent, {})
        for key, epoch in message.cross.items():
            cross[key] = max(epoch, cross.get(key, 0))
        if message.cluster == cluster.number:
            clocks.acquire(np.array([agent]), message.clock)
            continue
        row = message.clock[0]
        for other in range(1, clocks.warps + 1):
            if row[other]:
                key = ((message.cluster + 1) << CLUSTER_SHIFT) + other
                cross[key] = max(int(row[other]), cross.get(key, 0))
