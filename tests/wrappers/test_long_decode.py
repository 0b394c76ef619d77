"""Decode wrappers that plan long and short requests in turn: "auto" takes one backend, and results are right."""

from __future__ import annotations

import pytest

from cute_attn.emulator.settings import using
from tests.support.batch_case import decode, dims, heads, make, plan_arguments, wrapper
from tests.support.graphs import graph_wrapper
from tests.support.right import assert_planned_right

LONG, SHORT = (decode(lengths, dtype="bfloat16", **heads(16, 4), **dims(128)) for lengths in ((161, 70), (9, 40)))


@pytest.mark.emulator
def test_long_and_short_requests_take_xqa() -> None:
    """But not the same kernel: clusters share those of more than 144 keys."""
    with using("sm_90a") as emulation:
        planned = wrapper(LONG, backend="emulator")
        for case in (LONG, SHORT, LONG):
            assert_planned_right(case, planned)
            assert planned._planned().launch.on[1] == "xqa"
    assert [record.spec["work"] for record in emulation.records] == ["cluster", "whole", "cluster"]


def test_captured_launches_take_one_backend_for_all_lengths() -> None:
    with using("sm_90a"):
        planned, _ = graph_wrapper(LONG, "cpu", 200, 0, backend="emulator")
        for case in (LONG, SHORT, LONG):
            planned.plan(**plan_arguments(case, make(case)))
            assert planned._planned().launch.on[1] == "xqa"
