"""Schedules on a simulated device: the simulation by hand, and how close schedules come to an exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.schedule.constants import COMBINE_COST, ITEM_COST
from tests.support import makespan
from tests.support.makespan import DECODE, LIMITS, PREFILL, lengths_of, quality, random_batches, simulate, split_evenly
from tests.support.plain_schedule import schedule


def test_simulated_device_by_hand() -> None:
    """Items take one CTA for each of two kv heads: 5 and 4 start, 3 waits for the 4, 1 for the 5."""
    params = DECODE._replace(num_kv_heads=2, resident_ctas=4)
    assert simulate([5, 4, 3, 1], params) == 7
    assert simulate([5, 5, 5], params) == 10


def test_makespan_of_records_is_that_of_the_splits_they_describe() -> None:
    whole = lengths_of([1] * 33, [8192] * 33)
    assert makespan.makespan(schedule(whole, DECODE, LIMITS), DECODE) == 128 + ITEM_COST
    one = lengths_of([1], [131072])
    found = makespan.makespan(schedule(one, DECODE, LIMITS), DECODE)
    assert found == split_evenly([2048], 63, DECODE) == pytest.approx(63 + ITEM_COST + 0.25 + COMBINE_COST + 0.25)


@pytest.mark.parametrize(("params", "phase"), [(DECODE, "decode"), (PREFILL, "prefill")])
def test_schedules_are_nearly_as_short_as_the_best_even_split(params: makespan.SchedulerParams, phase: str) -> None:
    """In the model's time, so that no hardware decides: half of the batches get the best even split or a better one."""
    found = [quality(*batch) for batch in random_batches(phase, 60)]
    ratio = np.array([q.ours / q.best for q in found])
    assert np.median(ratio) <= 1.001
    assert np.quantile(ratio, 0.9) <= 1.06
    assert ratio.max() <= 1.4
    assert all(q.bound <= q.best * (1 + 1e-9) and q.bound <= q.ours * (1 + 1e-9) for q in found)
    assert max(q.unsplit / q.ours for q in found) > 5
    assert max(q.ours / q.unsplit for q in found) <= 1.05
