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
    own = batch.cta.rank
    if not cluster or not some(ranks != own):
        if some(ranks != own):
            lane = int(np.flatnonzero(ranks != own)[0])
            raise MemoryFault(f"{what} at {int(addresses[lane]):#x}: outside shared memory of the CTA", lane)
        return [(batch.cta.smem, slice(None))]
    found: list[tuple[SharedMemory, Any]] = []
    for rank in np.unique(ranks):
        if rank >= len(batch.cta.cluster.ctas):
            raise MemoryFault(f"{what}: no CTA of rank {int(rank)} in the cluster")
        found.append((batch.cta.cluster.ctas[rank].smem, np.flatnonzero(ranks == rank)))
    return found


def shared_at(
    batch: WarpBatch, addresses: Array, nbytes: int, what: str, cluster: bool = False
) -> tuple[SharedMemory, Array]:
    """The CTA's shared memory, and where in it these words are, which must be inside and aligned."""
    ((memory, _),) = shared_of(batch, addresses, what, cluster)
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


def words_of(rows: Array) -> Array:
    """View rows of bytes as words."""
    words: Array = np.ascontiguousarray(rows).view(word_type(rows.shape[1]))[:, 0]
    return words


def load_global(
    batch: WarpBatch, mask: Array | None, addresses: Array, nbytes: int, what: str, strong: bool = False
) -> Array:
    """Load words from global memory. `strong` accesses (relaxed, volatile, acquire) order others and do not race."""
    lanes = batch.lanes(mask)
    at = batch.full(addresses)[lanes]
    check_aligned(at, nbytes, what)
    rows = read_global(batch.cta, at, nbytes, None if strong else batch.lane_agents[lanes], what)
    if mask is None:
        return rows
    out = np.zeros((batch.size, nbytes), np.uint8)
    out[lanes] = rows
    return out


def store_global(
    batch: WarpBatch, mask: Array | None, addresses: Array, rows: Array, what: str, strong: bool = False
) -> None:
    lanes = batch.lanes(mask)
    at = batch.full(addresses)[lanes]
    check_aligned(at, rows.shape[1], what)
    write_global(batch.cta, at, rows[lanes], None if strong else batch.lane_agents[lanes], what)


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
    """Check accesses for races, where clocks are kept, and record them."""
    if by is None or not cluster.grid.checks:
        return
    cells = cells_of(offsets + (region.base & 3), nbytes)
    if isinstance(by, Op):
        _order_op(cluster, region, cells.ravel(), by, what, write)
    else:
        _order_warps(cluster, region, cells, by[positions], what, write)


def _order_warps(cluster: Cluster, region: Region, cells: Array, agents: Array, what: str, write: bool) -> None:
    """Check accesses for races with warps of this launch and with earlier launches."""
    clocks = cluster.clocks
    order = clocks.v[:, ORDER]
    rows = agents[:, None]
    _compare(cluster, region, cells, rows, *region.last_writes(cells), what, "write")
    own = rows + ((cluster.number + 1) << CLUSTER_SHIFT)
    if write:
        _compare(cluster, region, cells, rows, *region.last_reads(cells), what, "read")
        region.write(cells, own, order[rows, rows])
        lost = region.last_writes(cells)[0] != own
        if some(lost):
            raise Race(f"{what} of {region.name}: two warps write one address", int(np.argwhere(lost)[0][0]))
    else:
        region.read(cells, own, order[rows, rows])


def _local(cluster: Cluster, other: Array) -> tuple[Array, Array]:
    """Which launch-wide agents are of this cluster or an earlier launch, and as what its clocks know them."""
    home = other >> CLUSTER_SHIFT
    local = (home == cluster.number + 1) | (home == 0)
    return local, np.where(local, other & ((1 << CLUSTER_SHIFT) - 1), BEFORE)


def _compare(
    cluster: Cluster, region: Region, cells: Array, rows: Array, other: Array, epoch: Array, what: str, kind: str
) -> None:
    if not some(epoch):
        return
    local, agent = _local(cluster, other)
    late = local & (epoch > cluster.clocks.v[rows, ORDER, agent])
    foreign = ~local & (epoch > 0)
    if some(foreign):
        seen = cluster.cross
        for lane, column in np.argwhere(foreign):
            epoch_seen = seen.get(int(rows[lane, 0]), {}).get(int(other[lane, column]), 0)
            late[lane, column] = epoch[lane, column] > epoch_seen
    if some(late):
        lane, column = map(int, np.argwhere(late)[0])
        who = int(other[lane, column])
        name = (
            cluster.clocks.name(agent[lane, column])
            if local[lane, column]
            else (f"warp {(who & ((1 << CLUSTER_SHIFT) - 1)) - 1} of cluster {(who >> CLUSTER_SHIFT) - 1}")
        )
        raise Race(
            f"{what} of {region.name} at byte {int(cells[lane, column]) * 4} races with a {kind} by {name}", lane
        )


def _order_op(cluster: Cluster, region: Region, cells: Array, op: Op, what: str, write: bool) -> None:
    """Check an operation for races with warps and operations of the cluster and with earlier launches."""
    clocks = cluster.clocks
    home = (cluster.number + 1) << CLUSTER_SHIFT
    pairs = [(*region.last_writes(cells), "write")]
    if write:
        pairs.append((*region.last_reads(cells), "read"))
    for other, epoch, kind in pairs:
        here, agent = _local(cluster, other)
        late = here & (epoch > op.clock[ORDER, agent])
        if some(late):
            raise Race(f"{what} of {region.name} races with a {kind} by {clocks.name(int(agent[late][0]))}")
        unfenced = here & (agent != BEFORE) & (agent <= clocks.warps) & (epoch > op.clock[PROXY, agent])
        if kind == "write" and some(unfenced):
            raise ProxyFault(
                f"{what} of {region.name} meets an ordinary write by {clocks.name(int(agent[unfenced][0]))}: "
                "no fence.proxy.async lies between"
            )
    if write:
        region.write(cells, home + op.agent, op.epoch)
    else:
        region.read(cells, home + op.agent, op.epoch)
