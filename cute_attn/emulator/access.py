"""Loads and stores of lanes: from addresses to memories, with all checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cute_attn.emulator.clocks import BEFORE, ORDER, PROXY, Op
from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.errors import MemoryFault, ProxyFault, Race
from cute_attn.emulator.memory import (
    OFFSET_MASK,
    RANK_SHIFT,
    Region,
    SharedMemory,
    cells_of,
    check_global,
    put,
    word_type,
)

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cluster, Cta
    from cute_attn.emulator.warp_batch import WarpBatch

CLUSTER_SHIFT = 20  # launch-wide agent: (cluster number + 1) << CLUSTER_SHIFT | agent within the cluster


def shared_of(batch: WarpBatch, addresses: Array, what: str, cluster: bool = False) -> list[tuple[SharedMemory, Any]]:
    """Shared memories that 32-bit addresses refer to, each with the index of those that fall in it."""
    ranks = addresses >> np.uint32(RANK_SHIFT)
    elsewhere = ranks != batch.cta.rank
    if not some(elsewhere):
        return [(batch.cta.smem, slice(None))]
    if not cluster:
        lane = int(elsewhere.argmax())
        raise MemoryFault(f"{what} at {int(addresses[lane]):#x}: outside shared memory of the CTA", lane)
    found: list[tuple[SharedMemory, Any]] = []
    for rank in np.unique(ranks):
        if rank >= len(batch.cta.cluster.ctas):
            raise MemoryFault(f"{what}: no CTA of rank {int(rank)} in the cluster")
        found.append((batch.cta.cluster.ctas[rank].smem, np.flatnonzero(ranks == rank)))
    return found


def shared_at(batch: WarpBatch, addresses: Array, nbytes: int, what: str) -> tuple[SharedMemory, Array]:
    """The CTA's shared memory, and where in it these words are, which must be inside and aligned."""
    ((memory, _),) = shared_of(batch, addresses, what)
    offsets = offsets_of(addresses)
    memory.check(offsets, nbytes, what)
    return memory, offsets


def offsets_of(addresses: Array) -> Array:
    return (addresses & np.uint32(OFFSET_MASK)).astype(np.int64)


def load_shared(
    batch: WarpBatch, mask: Array | None, addresses: Array, nbytes: int, what: str, cluster: bool = False
) -> Array:
    """Load words as rows of bytes [lanes of the batch, nbytes]; inactive lanes get zeros."""
    lanes = batch.lanes(mask)
    at = batch.full(addresses)[lanes]
    out = np.zeros((batch.size, nbytes), np.uint8)
    for memory, chosen in shared_of(batch, at, what, cluster):
        offsets, agents = offsets_of(at[chosen]), batch.lane_agents[lanes[chosen]]
        memory.check(offsets, nbytes, what)
        out[lanes[chosen]] = memory.load(offsets, nbytes, agents, what).view(np.uint8).reshape(-1, nbytes)
    return out


def store_shared(
    batch: WarpBatch, mask: Array | None, addresses: Array, rows: Array, what: str, cluster: bool = False
) -> None:
    """Store rows of bytes [lanes of the batch, nbytes] to shared memory."""
    lanes = batch.lanes(mask)
    at = batch.full(addresses)[lanes]
    nbytes = rows.shape[1]
    for memory, chosen in shared_of(batch, at, what, cluster):
        offsets, agents = offsets_of(at[chosen]), batch.lane_agents[lanes[chosen]]
        memory.check(offsets, nbytes, what)
        memory.store(offsets, words_of(rows[lanes[chosen]]), agents, what)


def update_shared(batch: WarpBatch, mask: Array | None, addresses: Array, nbytes: int, what: str) -> None:
    """Check and record atomic updates of words of the CTA's shared memory, which do not race with one another."""
    lanes = batch.lanes(mask)
    memory, offsets = shared_at(batch, batch.full(addresses)[lanes], nbytes, what)
    memory.update(offsets, nbytes, batch.lane_agents[lanes], what)


def words_of(rows: Array) -> Array:
    """View rows of bytes as words."""
    return np.ascontiguousarray(rows).view(word_type(rows.shape[1]))[:, 0]


def load_global(
    batch: WarpBatch, mask: Array | None, addresses: Array, nbytes: int, what: str, strong: bool = False
) -> Array:
    """Load words from global memory. `strong` (relaxed) ones do not race."""
    lanes = batch.lanes(mask)
    at = batch.full(addresses)[lanes]
    check_aligned(at, nbytes, what)
    rows = read_global(batch.cta, at, nbytes, None if strong else batch.lane_agents[lanes], what)
    if mask is None:
        return rows
    out = np.zeros((batch.size, nbytes), np.uint8)
    out[lanes] = rows
    return out


def store_global(batch: WarpBatch, mask: Array | None, addresses: Array, rows: Array, what: str) -> None:
    lanes = batch.lanes(mask)
    at = batch.full(addresses)[lanes]
    check_aligned(at, rows.shape[1], what)
    write_global(batch.cta, at, rows[lanes], batch.lane_agents[lanes], what)


def read_global(cta: Cta, addresses: Array, nbytes: int, by: Array | Op | None, what: str) -> Array:
    """Read words as rows of bytes for warps (agents, one per word) or an operation; None: without checks of races."""
    rows = np.empty((len(addresses), nbytes), np.uint8)
    for region, positions, offsets in cta.grid.memory.split(addresses, nbytes, what):
        check_global(region, offsets, nbytes, what, write=False)
        if region.contested:
            _order(cta.cluster, region, offsets, nbytes, by, positions, what, write=False)
        rows[positions] = region.bytes.windows(nbytes)[offsets].view(np.uint8).reshape(-1, nbytes)
    return rows


def write_global(cta: Cta, addresses: Array, rows: Array, by: Array | Op | None, what: str) -> None:
    """Write rows of bytes, like `read_global`."""
    nbytes = rows.shape[1]
    for region, positions, offsets in cta.grid.memory.split(addresses, nbytes, what):
        check_global(region, offsets, nbytes, what, write=True)
        _order(cta.cluster, region, offsets, nbytes, by, positions, what, write=True)
        put(region.bytes, region.valid, offsets, words_of(rows[positions]))


def check_aligned(addresses: Array, nbytes: int, what: str) -> None:
    if len(addresses) and some(addresses & np.uint64(nbytes - 1)):
        lane = int(np.flatnonzero(addresses & np.uint64(nbytes - 1))[0])
        raise MemoryFault(f"{what} at {int(addresses[lane]):#x} is not aligned to {nbytes} bytes", lane)


def _order(
    cluster: Cluster,
    region: Region,
    offsets: Array,
    nbytes: int,
    by: Array | Op | None,
    positions: Any,
    what: str,
    write: bool,
) -> None:
    """Check accesses for races with the cluster's warps and operations and with earlier launches, those of warps also
    with other clusters, where clocks are kept, and record them."""
    if by is None or not cluster.grid.checks:
        return
    cells = cells_of(offsets + (region.base & 3), nbytes)
    who = by if isinstance(by, Op) else by[positions][:, None]
    _compare(cluster, region, cells, who, *region.last_writes(cells), what, "write")
    home, order = (cluster.number + 1) << CLUSTER_SHIFT, cluster.clocks.v[:, ORDER]
    own, now = (home + who.agent, who.epoch) if isinstance(who, Op) else (home + who, order[who, who])
    if not write:
        region.read(cells, own, now)
        return
    _compare(cluster, region, cells, who, *region.last_reads(cells), what, "read")
    region.write(cells, own, now)
    lost = region.last_writes(cells)[0] != own
    if some(lost):
        raise Race(f"{what} of {region.name}: two warps write one address", int(np.argwhere(lost)[0][0]))


def _compare(
    cluster: Cluster, region: Region, cells: Array, who: Array | Op, other: Array, epoch: Array, what: str, kind: str
) -> None:
    """Compare accesses of an operation, or of the warps of words [words, 1], with the last ones of their cells."""
    if not some(epoch):
        return
    clocks = cluster.clocks
    # Launch-wide agents of this cluster or an earlier launch, and as what its clocks know them.
    home = other >> CLUSTER_SHIFT
    local = (home == cluster.number + 1) | (home == 0)
    agent = np.where(local, other & ((1 << CLUSTER_SHIFT) - 1), BEFORE)
    if isinstance(who, Op):
        late = local & (epoch > who.clock[ORDER, agent])
    else:
        late = local & (epoch > clocks.v[who, ORDER, agent])
        for lane, column in np.argwhere(~local & (epoch > 0)):
            seen = cluster.cross.get(int(who[lane, 0]), {}).get(int(other[lane, column]), 0)
            late[lane, column] = epoch[lane, column] > seen
    if some(late):
        lane, column = map(int, np.argwhere(late)[0])
        if local[lane, column]:
            name = clocks.name(int(agent[lane, column]))
        else:
            number, warp = divmod(int(other[lane, column]), 1 << CLUSTER_SHIFT)
            name = f"warp {warp - 1} of cluster {number - 1}"
        at = f"{what} of {region.name} at byte {int(cells[lane, column]) * 4}"
        raise Race(f"{at} races with a {kind} by {name}", None if isinstance(who, Op) else lane)
    if isinstance(who, Op) and kind == "write":
        unfenced = local & (agent != BEFORE) & (agent <= clocks.warps) & (epoch > who.clock[PROXY, agent])
        if some(unfenced):
            raise ProxyFault(
                f"{what} of {region.name} meets an ordinary write by {clocks.name(int(agent[unfenced][0]))}: "
                "no fence.proxy.async lies between"
            )
