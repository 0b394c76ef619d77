"""The single-request matrix on everything that can run it."""

from __future__ import annotations

import pytest

from tests.support.executors import Executor
from tests.support.matrix import SMALL, Case
from tests.support.right import assert_solved, emulate


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_single(case: Case, executor: Executor) -> None:
    assert_solved(case, executor.device, backend=executor.backend)


# Of all others Ampere has Hopper's kernels of fa2, without the two instructions of dependent launches.
AMPERE = [
    case
    for case in SMALL
    if case.kv_dtype or case.head_dim_qk > 256 or case.qo_len * case.num_qo_heads // case.num_kv_heads > 64
]


@pytest.mark.emulator
@pytest.mark.parametrize("case", AMPERE, ids=lambda case: case.id)
def test_ampere(case: Case) -> None:
    """Tiles of many rows or wide heads, and numbers of 8 bits without instructions that convert them."""
    emulate(case, "sm_80", "fa2")
