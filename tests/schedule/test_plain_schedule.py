"""Schedules made with arrays are those of plain integers, bit by bit, for many batches."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.problem import BatchLengths
from cute_attn.schedule.batch import schedule
from tests.support.device_schedules import Arrays, bounded, random_case
from tests.support.plain_schedule import plain_schedule

BATCHES = 700  # of each seed


@pytest.mark.parametrize("seed", range(3))
def test_schedules(seed: int) -> None:
    rng = np.random.default_rng(seed)
    split = 0
    for i in range(BATCHES):
        case = random_case(rng, most_requests=70, most_tokens=4000)
        case = case._replace(limits=case.limits._replace(fixed_split_size=None))
        if rng.random() < 0.3:
            case = bounded(case, spare=7)
        qo_indptr, kv_start = Arrays.of(case).qo_indptr + rng.integers(0, 3), np.cumsum(case.kv_len) - case.kv_len
        mask = rng.integers(0, 1 << 40, len(case.kv_len)) if rng.random() < 0.2 else None
        lengths = BatchLengths(qo_indptr, kv_start, case.kv_len, mask)
        work = schedule(lengths, case.params, case.limits)
        assert work.ints.tolist() == plain_schedule(lengths, case.params, case.limits), f"batch {i}: {case}"
        split += work.num_partials > 0
    assert split > BATCHES // 20
