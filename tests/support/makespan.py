"""Quality of schedules in the cost model's time: a simulated device against bounds and other schedules."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cute_attn.problem import BatchLengths, BatchLimits
from cute_attn.schedule.batch import visible_kv_tiles
from cute_attn.schedule.constants import COMBINE_COST, ITEM_COST
from cute_attn.schedule.params import SchedulerParams
from cute_attn.schedule.records import NO_PARTIAL, Item
from cute_attn.schedule.split_kv import MAX_SPLITS
from tests.support.plain_schedule import WorkList, schedule

LIMITS = BatchLimits(workspace_bytes=1 << 40)
# Of fa2 at head dim 128 and 32 heads over 8 on an H200.
DECODE = SchedulerParams(
    rows=16,
    cols=64,
    group_size=4,
    num_kv_heads=8,
    causal=False,
    window_left=-1,
    resident_ctas=264,
    min_split_tiles=2,
    partial_row_bytes=4 * 129,
)
PREFILL = DECODE._replace(rows=128, causal=True, min_split_tiles=4)
MOST_TILES = 600  # query tiles of a batch that is simulated


class Quality(NamedTuple):
    """Makespans of one batch, in kv tiles."""

    ours: float
    unsplit: float
    best: float  # of all even splits
    bound: float  # no schedule is shorter


def simulate(costs: Sequence[float], params: SchedulerParams) -> float:
    """Returns the time at which the last CTA ends, if items in order take the CTAs that become free first, one per kv
    head.
    """
    free = [0.0] * params.resident_ctas
    for cost in costs:
        for _ in range(params.num_kv_heads):
            heapq.heapreplace(free, free[0] + cost)
    return max(free)


def makespan(work: WorkList, params: SchedulerParams) -> float:
    """Returns the makespan of a schedule's records, combine launch included."""
    column = {name: work.items[:, i].astype(np.float64) for i, name in enumerate(Item._fields)}
    tiles = np.ceil(column["kv_end"] / params.cols) - column["kv_begin"] / params.cols
    partial = params.rows / params.cols
    costs = tiles + ITEM_COST + partial * (column["partial"] != NO_PARTIAL)
    return simulate(costs[column["qo_len"] > 0].tolist(), params) + _combine(work.num_partials, params)


def split_evenly(visible: Sequence[int], chunk: int, params: SchedulerParams) -> float:
    """Returns the makespan when every query tile gets the fewest splits of at most `chunk` kv tiles, of equal size."""
    costs, partials = [], 0
    for tiles in visible:
        splits = max(1, -(-tiles // chunk))
        partials += splits if splits > 1 else 0
        extra = ITEM_COST + (params.rows / params.cols if splits > 1 else 0)
        costs += [(i + 1) * tiles // splits - i * tiles // splits + extra for i in range(splits)]
    return simulate(sorted(costs, reverse=True), params) + _combine(partials, params)


def quality(lengths: BatchLengths, params: SchedulerParams) -> Quality:
    """Compares our schedule with every even split of the longest tile into 1 to 128 parts."""
    begin, end = visible_kv_tiles(lengths, params)
    visible = (end - begin).tolist()
    longest = max(visible)
    min_chunk = max(params.min_split_tiles, -(-longest // MAX_SPLITS), 1)
    chunks = {max(min_chunk, -(-longest // splits)) for splits in range(1, MAX_SPLITS + 1)}
    unsplit = split_evenly(visible, max(longest, 1), params)
    best = min([unsplit, *(split_evenly(visible, chunk, params) for chunk in chunks)])
    share = (sum(visible) + ITEM_COST * len(visible)) * params.num_kv_heads / params.resident_ctas
    alone = min(longest, longest / MAX_SPLITS + COMBINE_COST) + ITEM_COST
    return Quality(makespan(schedule(lengths, params, LIMITS), params), unsplit, best, max(share, alone))


def _combine(partials: int, params: SchedulerParams) -> float:
    if not partials:
        return 0.0
    return COMBINE_COST + partials * params.num_kv_heads / params.resident_ctas * params.rows / params.cols


# --- batches ---------------------------------------------------------------------------------------------------------


def lengths_of(qo_len: Sequence[int] | np.ndarray, kv_len: Sequence[int] | np.ndarray) -> BatchLengths:
    """Returns a ragged batch whose masks take one byte per query token."""
    qo_indptr, kv_indptr = (np.concatenate(([0], np.cumsum(lens, dtype=np.int64))) for lens in (qo_len, kv_len))
    return BatchLengths(qo_indptr, kv_indptr[:-1], np.diff(kv_indptr), qo_indptr[:-1] + (5 << 32))


def random_batches(phase: str, count: int, seed: int = 0) -> Iterator[tuple[BatchLengths, SchedulerParams]]:
    """Yields batches of all sizes, even and skewed, on devices of several sizes."""
    rng = np.random.default_rng(seed)
    made = 0
    while made < count:
        params = DECODE if phase == "decode" else PREFILL
        params = params._replace(
            num_kv_heads=int(rng.choice([1, 2, 4, 8, 16])), resident_ctas=int(rng.choice([132, 264, 296]))
        )
        lengths = _random_decode(rng) if phase == "decode" else _random_prefill(rng)
        if len(visible_kv_tiles(lengths, params)[0]) <= MOST_TILES:
            made += 1
            yield lengths, params


def random_kv_len(rng: np.random.Generator, size: int, top: int, least: int = 0) -> np.ndarray:
    """Returns lengths up to `top` that are equal, even or skewed."""
    found: np.ndarray = [
        np.full(size, top),
        rng.integers(least, top + 1, size),
        np.exp(rng.uniform(0, np.log(top + 1 - least), size)).astype(np.int64),
        np.where(rng.random(size) < 0.1, top, top // 32),
    ][rng.integers(4)]
    return found


def _random_decode(rng: np.random.Generator) -> BatchLengths:
    size, top = _log_uniform(rng, 1, 300), _log_uniform(rng, 300, 100_000)
    return lengths_of(np.ones(size, np.int64), random_kv_len(rng, size, top, least=1))


def _random_prefill(rng: np.random.Generator) -> BatchLengths:
    size = _log_uniform(rng, 1, 12)
    qo_len = np.exp(rng.uniform(np.log(16), np.log(3000), size)).astype(np.int64)
    cached = np.exp(rng.uniform(0, np.log(40_000), size)).astype(np.int64) * (rng.random() < 0.6)
    return lengths_of(qo_len, qo_len + cached)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high))))
