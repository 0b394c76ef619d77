"""`fixed_split_size` and `disable_split_kv` as engines pass them, with and without CUDA graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cute_attn.request.batch_plan import Splits
from tests.support import graphs
from tests.support.batch_case import BatchCase, call, decode, heads, make, paged, plan_arguments, ragged, wrapper
from tests.support.formula import assert_batch_right

CASES = [
    paged((5, 0, 17), (40, 3, 33), page_size=4, **heads(4, 2)),
    ragged((5, 0, 17), (40, 3, 33), **heads(4, 2)),
    decode((40, 3, 0), page_size=4, **heads(4, 2)),
]
IDS = ["paged", "ragged", "decode"]


def planned(case: BatchCase, graph: bool, **splits: Any) -> Splits:
    made = graphs.graph_wrapper(case, "cpu", 40, 0)[0] if graph else wrapper(case)
    inputs = make(case)
    made.plan(**{**plan_arguments(case, inputs), **splits})
    assert_batch_right(case, inputs, *call(case, inputs, made))
    limits = made._planned().limits
    return Splits(limits.fixed_split_size, limits.disable_split_kv)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_minus_one_is_none_and_disabling_wins(case: BatchCase, graph: bool) -> None:
    assert planned(case, graph, fixed_split_size=-1) == Splits(None, False)
    assert planned(case, graph, fixed_split_size=-1, disable_split_kv=True) == Splits(None, True)
    assert planned(case, graph, fixed_split_size=4096, disable_split_kv=True) == Splits(None, True)
    assert planned(case, graph, fixed_split_size=2, disable_split_kv=False) == Splits(2 * case.page_size, False)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_equal_requests_for_splits_stay_equal_under_graphs(case: BatchCase) -> None:
    """Plans that disable splits are alike, whatever split size they name."""
    made, _ = graphs.graph_wrapper(case, "cpu", 40, 0)
    for size in (4096, None, -1, 16):
        other = dataclasses.replace(case, seed=hash(size) % 7)
        inputs = make(other)
        made.plan(**{**plan_arguments(other, inputs), "fixed_split_size": size, "disable_split_kv": True})
        assert_batch_right(other, inputs, *call(other, inputs, made))
