"""TMA: boxes of tensors between global and shared memory, and groups of stores."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator import access, tensormap
from cute_attn.emulator.clocks import Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import MemoryFault, PtxError
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.memory import GENERIC_PARAM, OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.warp_batch import Wait, WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

LATENCY = 600  # of virtual time, for the timeline
_HINT = "{|.L2::cache_hint}"
_DIMS = "{.1d|.2d|.3d|.4d|.5d}"
_PAIRS = (100, 103)  # architectures with pairs of CTAs
_GROUP = "{.cta_group::1|.cta_group::2}"


# --- tensors: loads ---------------------------------------------------------------------------------------------------


_LOAD = f"cp.async.bulk.tensor{_DIMS}"
_TILED = ".global{|.tile}.mbarrier::complete_tx::bytes"
_OPERANDS = "[u4] [u8]{i4} [u4]"


def _map_of(w: WarpBatch, lane: int, address: int, at: int, place: list[int], what: str) -> tensormap.TensorMap:
    """The tensor map at an address in the parameters or in global memory, checked with the box of a lane's copy."""
    cache: dict[int, tensormap.TensorMap] = w.cta.grid.tensor_maps
    found = cache.get(address)
    if found is None:
        if address >> 56 == GENERIC_PARAM >> 56:
            start = address & ((1 << 56) - 1)
            raw = w.cta.grid.params[start : start + tensormap.BYTES]
        else:
            if address % 64:
                raise MemoryFault(f"the tensor map at {address:#x} is not aligned to 64 bytes")
            rows = access.read_global(w.cta, np.array([address]), tensormap.BYTES, None, "a tensor map's read")
            raw = rows.tobytes()
        found = cache[address] = tensormap.decode(raw)
    if len(place) != found.rank:
        raise PtxError(f"{len(place)} coordinates of a tensor of rank {found.rank}", lane)
    if place[0] * found.item_bytes % tensormap.UNIT:
        raise MemoryFault(f"TMA at {tuple(place)}: a box must start at a multiple of 16 bytes", lane)
    if at % 128:
        raise MemoryFault(f"{what} shared {at:#x}, which is not aligned to 128 bytes", lane)
    return found


@called(
    f"{_LOAD}.shared::cluster{_TILED}{_GROUP}{_HINT}",
    f"{_LOAD}.shared::cluster{_TILED}.L2::cache_hint{_GROUP}",
    operands=_OPERANDS,
    since=100,
    only=_PAIRS,
)
@called(f"{_LOAD}.shared::cta{_TILED}{_HINT}", f"{_LOAD}.shared::cluster{_TILED}{_HINT}", operands=_OPERANDS, since=90)
def tensor_load(
    w: WarpBatch, mask: Array | None, target: Array, table: Array, coordinates: tuple[Array, ...], barrier: Array
) -> None:
    """Load boxes. With .cta_group::2 the barrier may be that of the CTA's peer."""
    for lane, map_address, at, counted, *place in w.each(mask, table, target, barrier, *coordinates):
        tensor = _map_of(w, lane, map_address, at, place, "TMA load to")
        op = w.begin_op(int(w.row[lane]), "TMA load")
        pieces = tensormap.chunks(tensor, place, tensor.line_bytes)
        _post_load(w.cta, at, pieces, counted, op, f"TMA load at {tuple(place)}")


def _post_load(cta: Cta, target: int, pieces: tensormap.Chunks, barrier: int, op: Op, what: str) -> None:
    """Post the copy of pieces of global memory, whose bytes a barrier counts, to a shared address of the cluster."""
    waiting = mbarrier.target(cta, barrier, op, f"a {what}")

    def arrive() -> None:
        rows = np.zeros((len(pieces.shared), pieces.nbytes), np.uint8)
        if pieces.inside.any():
            addresses = pieces.addresses[pieces.inside]
            rows[pieces.inside] = access.read_global(cta, addresses, pieces.nbytes, op, what)
        memory, offsets = cta.cluster.ctas[target >> RANK_SHIFT].smem, pieces.offsets(target & OFFSET_MASK)
        mbarrier.deliver(memory, offsets, access.words_of(rows), op, what, waiting, LATENCY)

    cta.post(arrive)


# --- tensors: stores --------------------------------------------------------------------------------------------------


@called(
    f"cp.async.bulk.tensor{_DIMS}.global.shared::cta{{|.tile}}.bulk_group{_HINT}", operands="[u8]{i4} [u4]", since=90
)
def tensor_store(w: WarpBatch, mask: Array | None, table: Array, coordinates: tuple[Array, ...], source: Array) -> None:
    tasks: dict[tuple[int, ...], Task] = {}
    for lane, map_address, at, *place in w.each(mask, table, source, *coordinates):
        tensor = _map_of(w, lane, map_address, at, place, "TMA store from")
        if min(place) < 0:  # unlike a load
            raise MemoryFault(f"TMA store at {tuple(place)}: no coordinate may be negative", lane)
        # A warp whose 32 lanes all store one box issues 32 stores with the effect of one.
        key = (int(w.row[lane]), map_address, at, *place)
        if key not in tasks:
            op = w.begin_op(int(w.row[lane]), "TMA store")
            pieces = tensormap.chunks(tensor, place, tensor.stored_line_bytes)
            tasks[key] = _posted_store(w.cta, at, pieces, op, f"TMA store at {tuple(place)}")
        _groups(w.cta)[w.thread(lane)][-1].append(tasks[key])


def _posted_store(cta: Cta, source: int, pieces: tensormap.Chunks, op: Op, what: str) -> Task:
    """Post the copy of pieces from a shared address to global memory."""
    task = Task(op)

    def store() -> None:
        task.done = True
        offsets = pieces.offsets(source & OFFSET_MASK)
        cta.smem.check(offsets, pieces.nbytes, what)
        addresses = pieces.addresses[pieces.inside]
        if len(addresses) == 0:
            return
        words = cta.smem.load(offsets[pieces.inside], pieces.nbytes, op, what)  # the rest may be anything
        access.write_global(cta, addresses, words.view(np.uint8).reshape(-1, pieces.nbytes), op, what)

    cta.post(store)
    return task


# --- groups of stores -------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """Store in flight."""

    op: Op
    done: bool = False


def _groups(cta: Cta) -> dict[int, list[list[Task]]]:
    """Stores by thread: groups, oldest first; the last is open."""
    return cta.unit("bulk groups", lambda: collections.defaultdict(lambda: [[]]), _check_unread)


def _check_unread(table: dict[int, list[list[Task]]]) -> None:
    """Shared memory must outlive the stores that read it, which only a wait shows."""
    for thread, groups in table.items():
        if any(groups):
            raise MemoryFault(f"the CTA ends while bulk stores of thread {thread} may still read its shared memory")


@called("cp.async.bulk.commit_group", since=90)
def commit(w: WarpBatch, mask: Array | None) -> None:
    table = _groups(w.cta)
    for lane in w.lanes(mask):
        if w.thread(lane) in table:
            table[w.thread(lane)].append([])


@called("cp.async.bulk.wait_group{|.read}", operands="#", since=90, solo=True)
def wait_group(w: WarpBatch, mask: Array | None, keep: int) -> None:
    table, clocks = _groups(w.cta), w.cta.clocks
    owners = [lane for lane in w.lanes(mask) if w.thread(lane) in table]
    stores: list[tuple[int, Task]] = []
    for lane in owners:
        groups = table[w.thread(lane)]
        while len(groups) - 1 > keep:
            stores += [(int(w.lane_agents[lane]), task) for task in groups.pop(0)]

    def done() -> bool:
        if not all(task.done for _, task in stores):
            return False
        for agent, task in stores:
            clocks.acquire(np.array([agent]), task.op.clock)
        return True

    if owners:
        w.wait = Wait(f"{len(stores)} bulk stores", done)
