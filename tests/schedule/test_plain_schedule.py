"""Schedules made with arrays are those of plain integers, bit by bit, for thousands of batches."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.problem import BatchLengths, BatchLimits, GraphLimits
from cute_attn.schedule.batch import SchedulerParams, schedule
from tests.support.plain_schedule import plain_schedule

BATCHES = 700  # of each kind


def queries(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "decode":
        return np.full(size, rng.integers(1, 5))
    lens = rng.integers(0, 120, size)
    return lens if kind == "prefill" else np.where(rng.random(size) < 0.6, 1, lens)


def random_batch(kind: str, rng: np.random.Generator) -> tuple[BatchLengths, SchedulerParams, BatchLimits]:
    size = int(rng.choice([1, 2, 3, 7, 12, 40, 70])) if rng.random() < 0.99 else 0
    qo_len, most_keys = queries(kind, size, rng), int(rng.choice([5, 300, 3000, 40_000]))
    kv_len = rng.integers(0, most_keys, size) + qo_len * int(rng.integers(0, 2))
    if rng.random() < 0.3:
        kv_len[1:] //= 20  # one long request
    start = int(rng.integers(0, 3))
    indptr = np.concatenate(([start], start + np.cumsum(qo_len, dtype=np.int64)))
    mask = rng.integers(0, 1 << 40, size) if rng.random() < 0.2 else None
    lengths = BatchLengths(indptr, np.cumsum(kv_len) - kv_len, kv_len, mask)
    params = SchedulerParams(
        rows=int(rng.choice([16, 64, 128])),
        cols=int(rng.choice([16, 64, 80])),
        group_size=int(rng.choice([1, 3, 4, 8])),
        num_kv_heads=int(rng.choice([1, 2, 8])),
        causal=bool(rng.random() < 0.5),
        window_left=int(rng.choice([-1, -1, 0, 30, 1000])),
        resident_ctas=int(rng.choice([4, 132, 264])),
        min_split_tiles=int(rng.integers(1, 4)),
        partial_row_bytes=516,
        l2_kv_tokens=int(rng.choice([0, 40, 5000])),
    )
    keys = int(kv_len.sum()) + int(rng.integers(0, 500))
    graph = GraphLimits(size, int(indptr[-1]) + 7, keys) if size and rng.random() < 0.3 else None
    workspace = int(rng.choice([0, 200_000, 128 << 20]))
    return lengths, params, BatchLimits(workspace, None, bool(rng.random() < 0.1), graph)


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_schedules(kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    split = 0
    for i in range(BATCHES):
        lengths, params, limits = random_batch(kind, rng)
        work = schedule(lengths, params, limits)
        assert work.ints.tolist() == plain_schedule(lengths, params, limits), f"batch {i}: {lengths}, {params}"
        split += work.num_partials > 0
    assert split > BATCHES // 20
