"""Schedules of few query tiles in plain Python are those made with arrays."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.problem import BatchLengths
from cute_attn.schedule import few_tiles
from cute_attn.schedule.batch import schedule
from tests.support.device_schedules import Arrays, Case, bounded, random_case

BATCHES = 1500


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
