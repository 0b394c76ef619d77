"""How often to cut the keys of each query tile of a batch: a search over piece sizes with a model of the makespan.

Times count kv tiles. A device runs `slots` CTAs at once and starts the next item, longest first, where one ends. How
long that takes is bounded from below by the longest item, by the work shared equally, and by the fullest slot: when
`count` CTAs cost `cost` or more, some slot runs `ceil(count / slots)` of them. Longest-first order comes close to the
largest of the three (`python -m perf.plan` prints how close), so that it serves as the estimate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cute_attn.schedule.split_kv import MAX_SPLITS

# Estimates, not tuned on hardware. An item starts, reads its query rows and writes its result; the combine launch
# waits for the last item and then works for a while.
START = 2.0
COMBINE = 3.0
LEVELS = 256  # lengths and costs are told apart to this part of the largest
GOOD_ENOUGH = 1.03  # of the work shared equally: no search beyond that
TINY = 0.5  # of a tile that sees nothing: it still is one item
WORTH_IT = 0.95  # of the makespan without cuts: estimates are not surer than that

# Candidates: the longest tile in so many pieces, and a slot's share of the work times these.
_LONGEST_OVER = np.array([2.0, 3.0, 4.0, 5.0, 6.0, 8.0])
_SHARE_TIMES = np.array([0.16, 0.2, 0.25, 1 / 3, 0.5, 0.55, 2 / 3, 0.75, 1.0, 1.1, 1.25, 1.5])
_LEVELS = np.arange(LEVELS + 1.0)
_ROW_STARTS = np.arange(len(_LONGEST_OVER) + len(_SHARE_TIMES))[:, None] * (LEVELS + 1)


class Room(NamedTuple):
    """How many records of each kind a schedule may have."""

    items: int
    merges: int
    partials: int


class Device(NamedTuple):
    """What the model needs to know beside lengths."""

    slots: float  # items that run at once
    min_tiles: int  # smallest piece worth its partial
    partial: float  # tiles that a partial costs, written or read


def pieces(visible: np.ndarray, device: Device, room: Room) -> np.ndarray | None:
    """Pieces of each query tile, given the kv tiles that it sees; None where no cut pays."""
    longest = int(visible.max(initial=0))
    if longest < 2 * device.min_tiles or min(room.merges, room.partials // 2) < 1:
        return None
    total = int(visible.sum(dtype=np.int64))
    if longest * device.slots <= (GOOD_ENOUGH - 1.0) * total:
        return None  # so many waves that longest-first order fills the last one well
    sizes, counts = _histogram(visible, longest)
    uncut, share = _uncut(sizes, counts, device)
    if uncut <= share * GOOD_ENOUGH:
        return None
    chunks = np.concatenate((longest / _LONGEST_OVER, total / device.slots * _SHARE_TIMES))
    chunks = np.ceil(np.minimum(np.maximum(chunks, max(device.min_tiles, longest / MAX_SPLITS)), longest))
    estimates = _makespans(sizes, counts, chunks, device, room)
    best = int(estimates.argmin())
    if estimates[best] > uncut * WORTH_IT:
        return None
    return -(-visible // int(chunks[best]))


def _histogram(visible: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """At most LEVELS sizes, ascending, and how many query tiles each stands for: itself and those a little shorter."""
    if longest <= LEVELS:
        level, sizes = visible, np.arange(longest + 1.0)
    else:
        level, sizes = visible // -(-(longest + 1) // LEVELS), np.zeros(LEVELS)
        np.maximum.at(sizes, level, visible)
    counts = np.bincount(level, minlength=len(sizes))
    used = counts.nonzero()[0]
    sizes[0] = max(sizes[0], TINY)
    return sizes[used], counts[used].astype(np.float64)


def _uncut(sizes: np.ndarray, counts: np.ndarray, device: Device) -> tuple[float, float]:
    """The makespan of a launch that cuts nothing, and the share of a slot in its work."""
    cost = sizes + START
    at_least = counts[::-1].cumsum()[::-1]  # items of this cost or more
    fullest = (np.ceil(at_least / device.slots) * cost).max()
    share = float(cost @ counts) / device.slots
    return max(share, float(fullest)), share


def _makespans(sizes: np.ndarray, counts: np.ndarray, chunks: np.ndarray, device: Device, room: Room) -> np.ndarray:
    """For each chunk: the makespan of cutting every tile into the fewest pieces no longer than it, as far as there is
    room."""
    cuts = np.ceil(sizes / chunks[:, None])
    cut = (cuts > 1.0).astype(np.float64)
    cost = np.ceil(sizes / cuts)  # of the longest piece
    cost += START + cut * device.partial
    number, partials, merges = cuts @ counts, (cuts * cut) @ counts, cut @ counts
    share = (sizes @ counts + START * number + device.partial * partials) / device.slots

    longest = cost.max(1)
    step = longest.max() / LEVELS
    level = (cost / step).astype(np.intp)
    level += _ROW_STARTS[: len(chunks)]
    at_level = np.bincount(level.ravel(), (cuts * counts).ravel(), len(chunks) * (LEVELS + 1)).reshape(len(chunks), -1)
    at_least = at_level[:, ::-1].cumsum(1)[:, ::-1]  # items of this cost or more
    fullest = (np.ceil(at_least / device.slots) * (_LEVELS * step)).max(1)

    result = np.maximum(np.maximum(share, fullest), longest)
    result += np.where(partials > 0, COMBINE + partials * device.partial / device.slots, 0.0)
    too_many = (partials > room.partials) | (number > room.items) | (merges > room.merges)
    result[too_many] = np.inf
    return result
