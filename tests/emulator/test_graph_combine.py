"""Combine launches of a fixed size: fewer warps than rows, each of which merges several rows."""

from __future__ import annotations

from typing import Any

import pytest

from cute_attn.emulator.machine import Schedule
from cute_attn.emulator.settings import using
from cute_attn.kernels.combine.spec import RESIDENT_ROWS, WARPS, CombineSpec
from cute_attn.schedule.records import Merge
from tests.support.batch_case import BatchCase, heads, paged
from tests.support.graphs import graph_wrapper
from tests.support.right import assert_planned_right

pytestmark = pytest.mark.emulator

ROWS = RESIDENT_ROWS  # that the launch merges at once on one multiprocessor
CASES: tuple[BatchCase, ...] = (
    paged((30, 9), (300, 40), mask="causal", fixed_split_size=8, sinks=True, **heads(2, 1)),
    paged((12, 0, 2), (90, 70, 20), fixed_split_size=8, **heads(4, 1)),  # nothing is cut
)


@pytest.mark.parametrize("schedule", ["eager", "adversarial"])
@pytest.mark.parametrize("case", CASES, ids=["cut", "whole"])
@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
def test_fewer_warps_than_rows(kernels: str, case: BatchCase, schedule: str) -> None:
    made: Any = graph_wrapper(case, "cpu", 60, 0, backend="emulator")[0]
    with using("sm_90a", kernels=kernels, schedule=Schedule(schedule, 1), sms=1) as emulation:
        assert_planned_right(case, made)
    plan = made._planned().launch.planned.schedule
    merges = plan.work.merges
    cut = int((merges[:, Merge._fields.index("qo_len")] > 0).sum())
    grids = [record.grid for record in emulation.records if record.spec["kernel"] == CombineSpec.kernel]
    assert grids == [(ROWS // WARPS, 1, 1)]
    assert plan.combine.num_rows > ROWS
    assert (cut * min(plan.rows_per_merge, 2 * case.qo_lens[0]) > ROWS) == (case is CASES[0])  # rows that exist
