"""Schedules on a simulated device: the simulation by hand, and how close schedules come to exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.schedule.batch import schedule
from cute_attn.schedule.cost_model import COMBINE, START
from perf import makespan, plan
from perf.makespan import DECODE, LIMITS, PREFILL, cut_evenly, lengths_of, quality, random_batches, simulate


def test_simulated_device_by_hand() -> None:
    """Two kv heads take two slots each: 5 and 4 start, 3 waits for the 4, 1 for the 5."""
    shape = DECODE._replace(num_kv_heads=2, slots=4)
    assert simulate([5, 4, 3, 1], shape) == 7
    assert simulate([5, 5, 5], shape) == 10


def test_makespan_of_records_is_that_of_the_cut_they_describe() -> None:
    whole = lengths_of([1] * 33, [8192] * 33)
    assert makespan.makespan(schedule(whole, DECODE, LIMITS), DECODE) == 128 + START
    one = lengths_of([1], [131072])
    found = makespan.makespan(schedule(one, DECODE, LIMITS), DECODE)
    assert found == cut_evenly([2048], 63, DECODE) == pytest.approx(63 + START + 0.25 + COMBINE + 0.25)


@pytest.mark.parametrize(("shape", "phase"), [(DECODE, "decode"), (PREFILL, "prefill")])
def test_schedules_are_nearly_as_short_as_the_best_even_cut(shape: makespan.TileShape, phase: str) -> None:
    """The model's own time, so that no hardware decides: half of the batches get the best cut or a better one."""
    found = [quality(*batch) for batch in random_batches(phase, 60)]
    ratio = np.array([q.ours / q.best for q in found])
    assert np.median(ratio) <= 1.001
    assert np.quantile(ratio, 0.9) <= 1.06
    assert ratio.max() <= 1.4
    assert all(q.bound <= q.best * (1 + 1e-9) and q.bound <= q.ours * (1 + 1e-9) for q in found)
    assert max(q.uncut / q.ours for q in found) > 5
    assert max(q.ours / q.uncut for q in found) <= 1.05


def test_plan_measures_calls_that_exist() -> None:
    for name, batch in plan.batches().items():
        calls = plan.calls(batch, plan.Staging(plan.torch.device("cpu")))
        assert list(calls) == ["schedule", "copy", "both"], name
        for call in calls.values():
            call()
    assert list(plan.calls(batch, None)) == ["schedule"]


def test_ratios_are_recorded_by_phase() -> None:
    found = plan.makespans(3)
    assert list(found) == ["decode", "prefill"]
    assert all(list(values) == sorted(values) for ratios in found.values() for values in ratios.values())
