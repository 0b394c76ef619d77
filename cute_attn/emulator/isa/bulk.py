"""Bulk copies: runs of bytes between global and shared memory; groups of bulk stores."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator import access, tensormap
from cute_attn.emulator.clocks import Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import MemoryFault
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.mbarrier import Mbarrier
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.memory import OFFSET_MASK, RANK_SHIFT, SharedMemory
from cute_attn.emulator.tensormap import Chunks
from cute_attn.emulator.warp_batch import Wait, WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

LATENCY = 600  # of virtual time, for the timeline
HINT = "{|.L2::cache_hint}"
MULTICAST = "{|.multicast::cluster}"


# --- loads and stores -------------------------------------------------------------------------------------------------


@called(
    f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{MULTICAST}{HINT}",
    f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes{HINT}",
    operands="$op [u4] [u8] u4 [u4] u4=0",
    since=90,
    golden="tma",
)
def bulk_load(
    w: WarpBatch, mask: Array | None, op: str, target: Array, source: Array, size: Array, barrier: Array, ctas: Array
) -> None:
    multicast = ".multicast::cluster" in op
    for lane, at, start, nbytes, bar, named in w.each(mask, target, source, size, barrier, ctas):
        _sixteen(at, start, nbytes)
        began = w.begin_op(int(w.row[lane]), "bulk load")
        for place, own in destinations(at, bar, named, multicast):
            post_load(w.cta, place, tensormap.run(start, nbytes), own, began, "bulk load")


def destinations(at: int, barrier: int, ctas: int, multicast: bool, pair: bool = False) -> list[tuple[int, int]]:
    """Shared addresses that a copy goes to, and of the barriers that count its bytes: in each CTA that `ctas` names, if
    it is multicast. With `pair` the barrier is in the CTA of the same pair that has the given one's parity.
    """
    if not multicast:
        return [(at, barrier)]
    leader, own, counts = barrier >> RANK_SHIFT & 1, at & OFFSET_MASK, barrier & OFFSET_MASK
    return [
        (rank << RANK_SHIFT | own, (rank & ~1 | leader if pair else rank) << RANK_SHIFT | counts)
        for rank in ranks_of(ctas)
    ]


def ranks_of(ctas: int) -> list[int]:
    """Ranks of the CTAs that a mask names."""
    return [rank for rank in range(16) if ctas >> rank & 1]


def _sixteen(*numbers: int) -> None:
    if any(number % 16 for number in numbers):
        raise MemoryFault("bulk copy: addresses and size must be multiples of 16: " + ", ".join(map(hex, numbers)))


def post_load(cta: Cta, target: int, pieces: Chunks, barrier: int, op: Op, what: str) -> None:
    """Post the copy of pieces of global memory, whose bytes a barrier counts, to a shared address of the cluster."""
    waiting = mbarrier.target(cta, barrier, op, f"a {what}")

    def arrive() -> None:
        rows = np.zeros((len(pieces.shared), pieces.nbytes), np.uint8)
        if pieces.inside.any():
            addresses = pieces.addresses[pieces.inside]
            rows[pieces.inside] = access.read_global(cta, addresses, pieces.nbytes, op, what)
        memory, offsets = cta.cluster.ctas[target >> RANK_SHIFT].smem, pieces.offsets(target & OFFSET_MASK)
        deliver(memory, offsets, access.words_of(rows), op, what, waiting, LATENCY)

    cta.post(arrive)


def deliver(
    memory: SharedMemory, offsets: Array, words: Array, op: Op, what: str, barrier: Mbarrier, latency: float = 0.0
) -> None:
    """Write what an asynchronous operation brings, and count its bytes at a barrier."""
    memory.check(offsets, words.itemsize, what)
    memory.store(offsets, words, op, what)
    barrier.complete(words.nbytes, op, latency)


@called(f"cp.async.bulk.global.shared::cta.bulk_group{HINT}", operands="[u8] [u4] u4", since=90, golden="tma")
def bulk_store(w: WarpBatch, mask: Array | None, target: Array, source: Array, size: Array) -> None:
    for lane, to, start, nbytes in w.each(mask, target, source, size):
        _sixteen(to, start, nbytes)
        op = w.begin_op(int(w.row[lane]), "bulk store")
        open_group(w, lane).append(posted_store(w.cta, start, tensormap.run(to, nbytes), op, "bulk store"))


def posted_store(cta: Cta, source: int, pieces: Chunks, op: Op, what: str) -> Task:
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


def open_group(w: WarpBatch, lane: int) -> list[Task]:
    """The open group of a thread."""
    return _groups(w.cta)[w.thread(lane)][-1]


def _check_unread(table: dict[int, list[list[Task]]]) -> None:
    """Shared memory must outlive the stores that read it, which only a wait shows."""
    for thread, groups in table.items():
        if any(groups):
            raise MemoryFault(f"the CTA ends while bulk stores of thread {thread} may still read its shared memory")


@called("cp.async.bulk.commit_group", since=90, conformance="order", golden="tma")
def commit(w: WarpBatch, mask: Array | None) -> None:
    table = _groups(w.cta)
    for lane in w.lanes(mask):
        if w.thread(lane) in table:
            table[w.thread(lane)].append([])


@called("cp.async.bulk.wait_group{|.read}", operands="#", since=90, solo=True, conformance="order", golden="tma")
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
