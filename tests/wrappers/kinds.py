"""One small batch for each kind of wrapper, and what tests of their plans and runs share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import graphs
from tests.support.batch_case import BatchCase, BatchInputs, call, decode, heads, make, paged, plan_arguments, ragged
from tests.support.batch_case import wrapper as eager_wrapper
from tests.support.formula import assert_batch_right

PAGED = paged((5, 0, 17), (40, 3, 33), page_size=4, **heads(4, 2))
RAGGED = ragged((5, 0, 17), (40, 3, 33), **heads(4, 2))
DECODE = decode((40, 3, 0), page_size=4, **heads(4, 2))
KINDS, IDS = [PAGED, RAGGED, DECODE], ["paged", "ragged", "decode"]
eager_and_graph = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def made_for(case: BatchCase, graph: bool = True, pages: int = 40, mask_bytes: int = 400) -> Any:
    """A wrapper; with buffers of these sizes for CUDA graphs, or without."""
    return graphs.graph_wrapper(case, "cpu", pages, mask_bytes)[0] if graph else eager_wrapper(case)


def run(case: BatchCase, inputs: BatchInputs, made: Any, **extra: Any) -> None:
    """Run a planned wrapper, and compare with the formula."""
    assert_batch_right(case, inputs, *call(case, inputs, made, **extra))


def plan_case(case: BatchCase, made: Any, **extra: Any) -> BatchInputs:
    """Plan a case, and return its tensors."""
    inputs = make(case)
    made.plan(**{**plan_arguments(case, inputs), **extra})
    return inputs


def plan_and_run(case: BatchCase, made: Any, **extra: Any) -> None:
    """Plan a case, run it and compare."""
    run(case, plan_case(case, made, **extra), made)
