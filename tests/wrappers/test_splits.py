"""`fixed_split_size` and `disable_split_kv` as engines pass them, with and without CUDA graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cute_attn.request.batch_plan import Splits
from tests.support.batch_case import BatchCase
from tests.wrappers.kinds import IDS, KINDS, eager_and_graph, made_for, plan_and_run


def planned(case: BatchCase, graph: bool, **splits: Any) -> Splits:
    made = made_for(case, graph)
    plan_and_run(case, made, **splits)
    limits = made._planned().limits
    return Splits(limits.fixed_split_size, limits.disable_split_kv)


@eager_and_graph
@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_minus_one_is_none_and_disabling_wins(case: BatchCase, graph: bool) -> None:
    assert planned(case, graph, fixed_split_size=-1) == Splits(None, False)
    assert planned(case, graph, fixed_split_size=-1, disable_split_kv=True) == Splits(None, True)
    assert planned(case, graph, fixed_split_size=4096, disable_split_kv=True) == Splits(None, True)
    assert planned(case, graph, fixed_split_size=2, disable_split_kv=False) == Splits(2 * case.page_size, False)


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_equal_requests_for_splits_stay_equal_under_graphs(case: BatchCase) -> None:
    """Plans that disable splits are alike, whatever split size they name."""
    made = made_for(case)
    for seed, size in enumerate((4096, None, -1, 16)):
        plan_and_run(dataclasses.replace(case, seed=seed), made, fixed_split_size=size, disable_split_kv=True)
