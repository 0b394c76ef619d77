"""The single-request matrix on everything that can run it."""

from __future__ import annotations

import pytest
import torch

from tests.support.executors import Executor, emulated
from tests.support.matrix import SMALL, Case, call, check, make


def solve(case: Case, executor: Executor) -> None:
    out, lse = call(case, make(case, torch.device(executor.device)), backend=executor.backend)
    result = check(case, out, lse)
    assert result.ok, result.detail


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_single(case: Case, executor: Executor) -> None:
    solve(case, executor)


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
    with emulated("sm_80").active():
        solve(case, emulated("sm_80"))
