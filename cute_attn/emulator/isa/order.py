"""Happens-before through global memory: a release at an address orders a warp before those that acquire there.

Epochs of warps of other clusters are kept in a dict, which is empty in most launches.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def release(w: WarpBatch, mask: Array | None, address: Array) -> None:
    """Record a releasing write by the active lanes."""
    cluster = w.cta.cluster
    if not cluster.grid.checks:
        return
    for lane, where in w.each(mask, address):
        agent = int(w.lane_agents[lane])
        clock = cluster.clocks.release(np.array([agent]))
        message = Message(cluster.number, clock, dict(cluster.cross.get(agent, {})))
        cluster.grid.released.setdefault(where, []).append(message)


def acquire(w: WarpBatch, mask: Array | None, address: Array) -> None:
    """Order the active lanes after what was released where they read."""
    cluster = w.cta.cluster
    clocks = cluster.clocks
    for lane, where in w.each(mask, address):
        agent = int(w.lane_agents[lane])
        for message in cluster.grid.released.get(where, ()):
            cross = cluster.cross.setdefault(agent, {})
            _join(cross, message.cross)
            if message.cluster == cluster.number:
                clocks.acquire(np.array([agent]), message.clock)
                continue
            row, home = message.clock[0], (message.cluster + 1) << CLUSTER_SHIFT
            _join(cross, {home + other: int(row[other]) for other in range(1, clocks.warps + 1) if row[other]})


def share(cluster: Cluster, agents: Array) -> None:
    """Join, for warps that met at a barrier, the epochs of other clusters that each has observed."""
    if not cluster.cross:
        return
    joint: dict[int, int] = {}
    for agent in agents:
        _join(joint, cluster.cross.get(int(agent), {}))
    for agent in agents:
        cluster.cross[int(agent)] = dict(joint)


def _join(known: dict[int, int], more: dict[int, int]) -> None:
    for key, epoch in more.items():
        known[key] = max(epoch, known.get(key, 0))
