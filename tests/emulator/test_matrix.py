"""The single-request matrix on everything that can run it."""

from __future__ import annotations

import functools

import pytest

from tests.support.case import features
from tests.support.cover import needed
from tests.support.executors import PARAMS, Executor
from tests.support.matrix import SMALL, Case
from tests.support.persistent_emulated import CUDA
from tests.support.right import assert_solved


def differs_on_ampere(case: Case) -> bool:
    """Tiles of many rows or wide heads, and numbers of 8 bits, which no instruction converts. Of all others Ampere has
    Hopper's kernels of fa2, but for the two instructions of dependent launches and min.relu.
    """
    rows = case.qo_len * case.num_qo_heads // case.num_kv_heads
    return case.kv_dtype is not None or case.head_dim_qk > 256 or rows > 64


EMULATED = needed(SMALL, functools.partial(features, device=CUDA))
CASES = [
    pytest.param(case, *param.values, id=f"{param.id}-{case.id}", marks=param.marks)
    for param in PARAMS
    for case in (EMULATED if param.values[0].arch else SMALL)
    if param.values[0].arch != "sm_80" or differs_on_ampere(case)
]


@pytest.mark.parametrize(("case", "on"), CASES)
def test_single(case: Case, on: Executor) -> None:
    with on.active():
        assert_solved(case, on.device, backend=on.backend)
