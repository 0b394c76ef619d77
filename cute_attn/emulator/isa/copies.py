"""ldmatrix, stmatrix and cp.async."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.clocks import ORDER, Op
from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.memory import SharedMemory
from cute_attn.emulator.warp_batch import WarpBatch

_SHARED = "{.shared|.shared::cta}"


# --- ldmatrix, stmatrix -----------------------------------------------------------------------------------------------


def _rows(
    w: WarpBatch, mask: Array | None, address: Array, count: int, what: str
) -> tuple[SharedMemory, Array, Array, Any]:
    """Shared memory, where in it the 8 * count rows of 16 bytes of each active warp are, whose first lanes have the
    addresses, the agents of the rows, and the index of those warps.
    """
    present = slice(None) if mask is None else mask.reshape(-1, 32)[:, 0]
    memory, offsets = access.shared_at(w, w.full(address).reshape(-1, 32)[present, : 8 * count].ravel(), 16, what)
    return memory, offsets, np.repeat(w.agents[present], 8 * count), present


@called(
    f"ldmatrix.sync.aligned.m8n8.x{{1|2|4}}{{|.trans}}{_SHARED}.b16",
    operands="$0 $1 [u4]",
    results="{u4}",
    aligned="ldmatrix",
)
def ldmatrix(w: WarpBatch, mask: Array | None, matrices: str, trans: str, address: Array) -> Array:
    count = int(matrices)
    data = _loaded(w, mask, address, count)
    if trans:
        # lane l gets rows 2 (l % 4) and + 1 of column l / 4
        items = data.view(np.uint16).reshape(-1, count, 4, 2, 8).transpose(1, 0, 4, 2, 3)
    else:
        items = data.view(np.uint32).reshape(-1, count, 32).transpose(1, 0, 2)
    return _lanes(w, mask, np.ascontiguousarray(items).view(np.uint32).reshape(count, -1))


def _loaded(w: WarpBatch, mask: Array | None, address: Array, count: int) -> Array:
    memory, offsets, agents, _ = _rows(w, mask, address, count, "ldmatrix")
    return memory.load(offsets, 16, agents, "ldmatrix")


def _lanes(w: WarpBatch, mask: Array | None, words: Array) -> Array:
    """Words of the lanes of active warps as those of all lanes."""
    if mask is None:
        return words
    out = np.zeros((len(words), w.size), np.uint32)
    out[:, mask] = words
    return out


@called(
    f"ldmatrix.sync.aligned.m16n16.x{{1|2}}.trans{_SHARED}.b8",
    operands="$0 [u4]",
    results="{u4}",
    since=100,
    aligned="ldmatrix",
)
def ldmatrix_bytes(w: WarpBatch, mask: Array | None, matrices: str, address: Array) -> Array:
    """Lane l gets bytes l / 4 and l / 4 + 8 of rows 4 (l % 4) + 0..3 of each matrix."""
    count = int(matrices)
    data = _loaded(w, mask, address, 2 * count)
    items = data.view(np.uint8).reshape(-1, count, 4, 4, 2, 8).transpose(1, 4, 0, 5, 2, 3)
    return _lanes(w, mask, np.ascontiguousarray(items).view(np.uint32).reshape(2 * count, -1))


@called(f"stmatrix.sync.aligned.m8n8.x{{1|2|4}}{_SHARED}.b16", operands="[u4] {u4}", since=90, aligned="stmatrix")
def stmatrix(w: WarpBatch, mask: Array | None, address: Array, sources: tuple[Array, ...]) -> None:
    count = len(sources)
    memory, offsets, agents, present = _rows(w, mask, address, count, "stmatrix")
    words = np.stack([w.full(s) for s in sources]).reshape(count, -1, 32)[:, present].transpose(1, 0, 2)
    rows = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 16)
    memory.store(offsets, access.words_of(rows), agents, "stmatrix")


# --- cp.async ---------------------------------------------------------------------------------------------------------


Copy = tuple[SharedMemory, Array, Array]  # offsets and words


@dataclass
class Group:
    """cp.async of one warp that are committed together. On the completion of its operations an mbarrier may arrive."""

    copies: list[Copy] = field(default_factory=list)  # that have not landed
    ops: list[Op] = field(default_factory=list)
    closed: bool = True  # copies to come are another operation

    def land(self) -> None:
        """Write what the copies bring, on behalf of the last operation."""
        while self.copies:
            memory, offsets, words = self.copies.pop(0)
            memory.store(offsets, words, self.ops[-1], "cp.async")


def _groups(w: WarpBatch, position: int) -> list[Group]:
    """Groups of a warp, oldest first; the last is open."""
    table = w.cta.unit("cp.async", lambda: collections.defaultdict[int, list[Group]](lambda: [Group()]))
    return table[int(w.warps[position])]


@called(
    f"cp.async{{.ca|.cg}}{_SHARED}.global{{|.L2::cache_hint}}{{|.L2::64B|.L2::128B|.L2::256B}}",
    operands="$0 [u4] [u8] # u4=None",
)
def cp_async(
    w: WarpBatch, mask: Array | None, cache: str, target: Array, source: Array, size: int, given: Array | None
) -> None:
    """Copy `size` bytes: the first `given` are read (0 allows any address), the others are filled with zeros."""
    if size not in ((16,) if cache == ".cg" else (4, 8, 16)):
        raise PtxError(f"cp.async{cache} of {size} bytes")
    lanes = w.lanes(mask)
    memory, offsets = access.shared_at(w, w.full(target)[lanes], size, "cp.async")
    words = access.words_of(_source(w, mask, source, size, given)[lanes])
    owners = w.row[lanes]
    for position in np.unique(owners):
        group = _groups(w, int(position))[-1]
        if group.closed:
            group.ops.append(w.begin_op(int(position), "cp.async", generic=True))
        group.closed = False
        chosen = owners == position
        group.copies.append((memory, offsets[chosen], words[chosen]))
        if w.cta.grid.schedule.kind == "eager":
            group.land()


def _source(w: WarpBatch, mask: Array | None, source: Array, size: int, given: Array | None) -> Array:
    """Read the first `given` of `size` bytes: as a word if they are all, else byte by byte."""
    if given is None:
        return access.load_global(w, mask, source, size, "cp.async")
    wanted, rows = w.full(given), np.zeros((w.size, size), np.uint8)
    if (wanted[w.lanes(mask)] > size).any():
        raise PtxError(f"cp.async: source size above {size}")
    whole = w.active(mask) & (wanted == size)
    if some(whole):
        rows = access.load_global(w, whole, source, size, "cp.async")
    part = w.active(mask) & (wanted < size)
    for i in range(int(wanted[part].max(initial=0))):
        reading = part & (wanted > i)
        column = access.load_global(w, reading, source + np.uint64(i), 1, "cp.async")
        rows[reading, i] = column[reading, 0]
    return rows


def outstanding(w: WarpBatch, position: int) -> list[Op]:
    """Operations of a warp whose completion it has not observed. Copies that a schedule has delayed land now."""
    groups, seen = _groups(w, position), w.cta.clocks.v[w.agents[position], ORDER]
    for group in groups:
        group.land()
    groups[-1].ops = [op for op in groups[-1].ops if seen[op.agent] < op.epoch]
    groups[-1].closed = True
    return [op for group in groups for op in group.ops]


# Groups are kept per warp: lanes on their own are refused.


@called("cp.async.commit_group", aligned="cp.async.commit_group")
def commit(w: WarpBatch, mask: Array | None) -> None:
    for position in w.row[w.first_lanes(mask)]:
        _groups(w, int(position)).append(Group())


@called("cp.async.wait_group", operands="#", aligned="cp.async.wait_group")
def wait(w: WarpBatch, mask: Array | None, keep: int) -> None:
    for position in w.row[w.first_lanes(mask)]:
        groups = _groups(w, int(position))
        while len(groups) - 1 > keep:
            group = groups.pop(0)
            group.land()
            for op in group.ops:
                w.cta.clocks.acquire(w.agents[position : position + 1], op.clock)
