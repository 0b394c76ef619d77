"""Schedules of few query tiles in plain Python are those made with arrays, and so is the search for a split size."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.problem import BatchLengths
from cute_attn.schedule import cost_model, few_tiles
from cute_attn.schedule.batch import schedule
from cute_attn.schedule.cost_model import Capacity, Device
from tests.support.device_schedules import Arrays, Case, bounded, random_case

BATCHES = 1500
SEARCHES = 3000
UNLIMITED = Capacity(1 << 62, 1 << 62, 1 << 62)


def lengths_of(case: Case, first: int) -> BatchLengths:
    arrays = Arrays.of(case)
    return BatchLengths(arrays.qo_indptr + first, np.asarray(arrays.kv_indptr[:-1]), case.kv_len)


def test_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    covered = split = 0
    while covered < BATCHES:
        case, first = random_case(rng, 2 * few_tiles.FEW), int(rng.integers(0, 3))
        if rng.random() < 0.4:
            case = bounded(case, first + int(rng.choice([0, 3, 1000])))
        case = case._replace(limits=case.limits._replace(fixed_split_size=None))
        if not few_tiles.covers(lengths_of(case, first), case.params):
            continue
        plain = schedule(lengths_of(case, first), case.params, case.limits)
        with monkeypatch.context() as patched:
            patched.setattr(few_tiles, "covers", lambda lengths, params: False)
            arrays = schedule(lengths_of(case, first), case.params, case.limits)
        listed = lengths_of(case, first)
        if listed.batch_size:
            listed = BatchLengths.of_lists(listed.lists)
        assert schedule(listed, case.params, case.limits).ints.tolist() == arrays.ints.tolist(), str(case)
        assert plain.ints.tolist() == arrays.ints.tolist(), str(case)
        assert plain.items.shape == arrays.items.shape, str(case)
        assert plain.merges.shape == arrays.merges.shape, str(case)
        assert plain[:3] == arrays[:3], str(case)
        covered, split = covered + 1, split + (plain.num_partials > 0)
    assert split > BATCHES // 20


def random_tiles(rng: np.random.Generator) -> np.ndarray:
    """Returns the kv tiles of query tiles: some see none, some more than the histogram has bins for."""
    size, top = int(rng.integers(1, 33)), int(rng.choice([3, 20, 100, 300, 2000, 30_000]))
    even, skewed = rng.integers(0, top + 1, size), np.exp(rng.uniform(0, np.log(top + 1), size)).astype(np.int64)
    return [even, skewed, np.where(rng.random(size) < 0.1, top, top // 32)][rng.integers(3)]


def search_both_ways(
    monkeypatch: pytest.MonkeyPatch, visible: np.ndarray, device: Device, capacity: Capacity
) -> list[list[int] | None]:
    """Returns the splits that plain Python and arrays find."""
    found = []
    for most in (len(visible), 0):
        monkeypatch.setattr(cost_model, "PLAIN_TILES", most)
        cost_model.split_size.cache_clear()
        splits = cost_model.num_splits(visible, device, capacity)
        found.append(None if splits is None else splits.tolist())
    return found


def test_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    pays = 0
    for _ in range(SEARCHES):
        visible = random_tiles(rng)
        device = Device(*(int(rng.choice(x)) for x in ([1, 16, 132, 296], [1, 3, 8, 32], [1, 2, 6], [1, 8, 16, 64])))
        capacity = UNLIMITED
        if rng.random() < 0.4:
            capacity = Capacity(len(visible) + int(rng.integers(0, 40)), int(rng.integers(0, 9)), int(rng.integers(99)))
        plain, arrays = search_both_ways(monkeypatch, visible, device, capacity)
        assert plain == arrays, f"{visible.tolist()} {device} {capacity}"
        pays += plain is not None
    assert pays > SEARCHES // 10


def test_sizes_that_split_only_rounded_tiles_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 86 and 112 kv tiles per split, which cost the same, the former comes first and splits the tile of 112 too."""
    visible = np.array([1, 153, 113, 257, 11, 250, 3, 38, 2, 6, 112])
    plain, arrays = search_both_ways(monkeypatch, visible, Device(148, 32, 1, 16), UNLIMITED)
    assert plain == arrays == [1, 2, 2, 3, 1, 3, 1, 1, 1, 1, 2]
