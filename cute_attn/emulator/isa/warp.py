"""Warp-level instructions: shfl, vote, match, redux, elect, activemask, bar.warp."""

from __future__ import annotations

import numpy as np

from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.errors import Divergence
from cute_attn.emulator.isa.atomics import UFUNCS
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.warp_batch import WarpBatch

_BITS = np.uint64(1) << np.arange(32, dtype=np.uint64)


def ballot(rows: Array) -> Array:
    """Pack bools [warps, 32] into one 32-bit mask per warp."""
    return (rows * _BITS).sum(axis=1).astype(np.uint32)


def members(w: WarpBatch, mask: Array | None, member_mask: Array, what: str) -> None:
    """Check that every active lane names all participating lanes, and that all of them are active."""
    if mask is None and member_mask.shape[0] == 1 and member_mask[0] == 0xFFFFFFFF:
        return
    active = w.active(mask)
    here = ballot(active.reshape(-1, 32))[w.row]
    named = w.full(member_mask)
    own = np.uint32(1) << w.lane.astype(np.uint32)
    wrong = active & (((named & ~here) != 0) | ((named & own) == 0))
    if some(wrong):
        lane = int(np.flatnonzero(wrong)[0])
        raise Divergence(
            f"{what} names lanes {int(named[lane]):#010x} of warp {int(w.warps[w.row[lane]])}, "
            f"lanes {int(here[lane]):#010x} are here",
            lane % 32,
        )


@called("shfl.sync{.up|.down|.bfly|.idx}.b32", operands="$0 u4 u4 u4 u4", results="u4 p", converges=True)
def shfl(
    w: WarpBatch, mask: Array | None, mode: str, a: Array, b: Array, c: Array, member: Array
) -> tuple[Array, Array]:
    members(w, mask, member, "shfl.sync")
    if len(b) > 1 or len(c) > 1:
        source, valid = _sources(w, mode, b, c)
    else:
        key = mode, int(b[0]), int(c[0])
        found = w.shuffles.get(key)
        if found is None:
            source, valid = _sources(w, mode, b, c)
            one = not some(source != source[0])  # a single warp that reads one lane: what follows is the same in all
            found = w.shuffles[key] = (source[:1] if one else source), valid
        source, valid = found
    return (a.copy() if len(a) == 1 else a[source]), valid


def _sources(w: WarpBatch, mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """The lane of the batch that each lane reads, and whether shfl's own choice exists."""
    lane = w.lane
    bound, segment = (c & np.uint32(31)).astype(np.int64), ((c >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
    step = (b & np.uint32(31)).astype(np.int64)
    low = lane & segment
    high = low | (bound & ~segment)
    if mode == ".up":
        source, valid = lane - step, lane - step >= high
    elif mode == ".down":
        source, valid = lane + step, lane + step <= high
    elif mode == ".bfly":
        source, valid = lane ^ step, (lane ^ step) <= high
    else:
        source = low | (step & ~segment)
        valid = source <= high
    source = np.where(valid, source, lane) & 31
    return w.row * 32 + source, valid


@called("vote.sync{.any|.all|.uni}.pred", operands="$0 p u4", results="p", converges=True)
def vote(w: WarpBatch, mask: Array | None, mode: str, p: Array, member: Array) -> Array:
    members(w, mask, member, "vote.sync")
    active = w.active(mask).reshape(-1, 32)
    yes = w.full(p).reshape(-1, 32)
    one, every = (yes & active).any(axis=1), (yes | ~active).all(axis=1)
    results: dict[str, Array] = {".any": np.asarray(one), ".all": np.asarray(every), ".uni": np.asarray(every | ~one)}
    return results[mode][w.row]


@called("vote.sync.ballot.b32", operands="p u4", results="u4", converges=True)
def vote_ballot(w: WarpBatch, mask: Array | None, p: Array, member: Array) -> Array:
    members(w, mask, member, "vote.sync")
    return ballot((w.full(p) & w.active(mask)).reshape(-1, 32))[w.row]


@called("activemask.b32", results="u4")
def activemask(w: WarpBatch, mask: Array | None) -> Array:
    return ballot(w.active(mask).reshape(-1, 32))[w.row]


@called("match.any.sync.b32", operands=". u4", results="u4", converges=True)
def match_any(w: WarpBatch, mask: Array | None, a: Array, member: Array) -> Array:
    members(w, mask, member, "match.sync")
    rows = w.full(a).reshape(-1, 32)
    active = w.active(mask).reshape(-1, 32)
    same = (rows[:, :, None] == rows[:, None, :]) & active[:, None, :]
    return ballot(same.reshape(-1, 32))


@called("match.all.sync.b32", operands=". u4", results="u4 p", converges=True)
def match_all(w: WarpBatch, mask: Array | None, a: Array, member: Array) -> tuple[Array, Array]:
    same = match_any(w, mask, a, member)
    here = activemask(w, mask)
    every = same == here
    return np.where(every, here, np.uint32(0)), every


@called("redux.sync{.add|.min|.max|.and|.or|.xor}{.u32|.s32|.b32}", operands="$0 . u4", results=".", converges=True)
def redux(w: WarpBatch, mask: Array | None, op: str, a: Array, member: Array) -> Array:
    members(w, mask, member, "redux.sync")
    rows = w.full(a).reshape(-1, 32)
    active = w.active(mask).reshape(-1, 32)
    out = np.zeros(rows.shape, rows.dtype)
    for i in range(len(rows)):
        if active[i].any():
            out[i] = UFUNCS[op].reduce(rows[i][active[i]], dtype=rows.dtype)
    return out.ravel()


@called("elect.sync", operands="u4", results="u4 p", since=90, converges=True)
def elect(w: WarpBatch, mask: Array | None, member: Array) -> tuple[Array, Array]:
    members(w, mask, member, "elect.sync")
    first = np.zeros(len(w.warps), np.uint32)
    leaders = w.first_lanes(mask)
    first[w.row[leaders]] = w.lane[leaders]
    chosen = first[w.row]
    return chosen, w.lane == chosen


@called("bar.warp.sync", operands="u4", converges=True)
def bar_warp(w: WarpBatch, mask: Array | None, member: Array) -> None:
    members(w, mask, member, "bar.warp.sync")
