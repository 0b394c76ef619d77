"""Ordering through global memory: what a release at an address hands to whoever acquires there.

A fence keeps what the warp knows; strong writes after it publish that, and what strong reads have seen becomes
knowledge at the next fence. Knowledge of warps of other clusters is a dict of epochs, empty in most launches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator.access import CLUSTER_SHIFT
from cute_attn.emulator.dtypes import Array

if TYPE_CHECKING:
    from cute_attn.emulator.gang import Gang
    from cute_attn.emulator.machine import Cluster


@dataclass
class Message:
    """What a warp knew when it released: its clock, and its epochs of other clusters."""

    cluster: int
    clock: Array
    cross: dict[int, int]


@dataclass
class Knowledge:
    """Of one grid: messages at addresses. Of each warp: what its last fence released, what it read since."""

    at: dict[int, list[Message]] = field(default_factory=dict)
    fenced: dict[tuple[int, int], Message] = field(default_factory=dict)
    seen: dict[tuple[int, int], list[Message]] = field(default_factory=dict)


def publish(g: Gang, mask: Array | None, address: Array, release: bool) -> None:
    """A strong write by the active lanes, after it took place."""
    cluster, knowledge = g.cta.cluster, g.cta.grid.knowledge
    if cluster.clocks is None:
        return
    where = g.full(address)
    for lane in g.lanes(mask):
        agent = int(g.lane_agents[lane])
        message = _message(cluster, agent) if release else knowledge.fenced.get((cluster.number, agent))
        if message is not None:
            knowledge.at.setdefault(int(where[lane]), []).append(message)


def observe(g: Gang, mask: Array | None, address: Array, acquire: bool) -> None:
    """A strong read by the active lanes."""
    cluster, knowledge = g.cta.cluster, g.cta.grid.knowledge
    if cluster.clocks is None or not knowledge.at:
        return
    where = g.full(address)
    for lane in g.lanes(mask):
        messages = knowledge.at.get(int(where[lane]), [])
        agent = int(g.lane_agents[lane])
        if acquire:
            _learn(cluster, agent, messages)
        elif messages:
            knowledge.seen.setdefault((cluster.number, agent), []).extend(messages)


def fence(g: Gang, mask: Array | None) -> None:
    """fence.acq_rel / fence.sc / membar of gpu or wider scope."""
    cluster, knowledge = g.cta.cluster, g.cta.grid.knowledge
    if cluster.clocks is None:
        return
    for lane in g.first_lanes(mask):
        agent = int(g.lane_agents[lane])
        _learn(cluster, agent, knowledge.seen.pop((cluster.number, agent), []))
        knowledge.fenced[cluster.number, agent] = _message(cluster, agent)


def share(cluster: Cluster, agents: Array) -> None:
    """Warps that met at a barrier know of other clusters what any of them knows."""
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


def _learn(cluster: Cluster, agent: int, messages: list[Message]) -> None:
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
