"""Happens-before through global memory: a release at an address orders a warp before those that acquire there.

A fence saves the warp's clock; strong writes after it publish that clock, and clocks observed by strong reads are
acquired at the next fence. Epochs of warps of other clusters are kept in a dict, which is empty in most launches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator.access import CLUSTER_SHIFT
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
    messages that it has read since."""

    released: dict[int, list[Message]] = field(default_factory=dict)
    fenced: dict[tuple[int, int], Message] = field(default_factory=dict)
    observed: dict[tuple[int, int], list[Message]] = field(default_factory=dict)


def publish(w: WarpBatch, mask: Array | None, address: Array, release: bool) -> None:
    """Record a strong write by the active lanes. Called after the write."""
    cluster, relation = w.cta.cluster, w.cta.grid.happens_before
    if cluster.clocks is None:
        return
    where = w.full(address)
    for lane in w.lanes(mask):
        agent = int(w.lane_agents[lane])
        message = _message(cluster, agent) if release else relation.fenced.get((cluster.number, agent))
        if message is not None:
            relation.released.setdefault(int(where[lane]), []).append(message)


def observe(w: WarpBatch, mask: Array | None, address: Array, acquire: bool) -> None:
    """Record a strong read by the active lanes."""
    cluster, relation = w.cta.cluster, w.cta.grid.happens_before
    if cluster.clocks is None or not relation.released:
        return
    where = w.full(address)
    for lane in w.lanes(mask):
        messages = relation.released.get(int(where[lane]), [])
        agent = int(w.lane_agents[lane])
        if acquire:
            _acquire(cluster, agent, messages)
        elif messages:
            relation.observed.setdefault((cluster.number, agent), []).extend(messages)


def fence(w: WarpBatch, mask: Array | None) -> None:
    """Apply fence.acq_rel, fence.sc or membar of gpu or wider scope."""
    cluster, relation = w.cta.cluster, w.cta.grid.happens_before
    if cluster.clocks is None:
        return
    for lane in w.first_lanes(mask):
        agent = int(w.lane_agents[lane])
        _acquire(cluster, agent, relation.observed.pop((cluster.number, agent), []))
        relation.fenced[cluster.number, agent] = _message(cluster, agent)


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
    assert cluster.clocks is not None
    clock = cluster.clocks.release(np.array([agent]))
    return Message(cluster.number, clock, dict(cluster.cross.get(agent, {})))


def _acquire(cluster: Cluster, agent: int, messages: list[Message]) -> None:
    clocks = cluster.clocks
    assert clocks is not None
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
