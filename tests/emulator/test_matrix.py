"""The single-request matrix on everything that can run it."""

from __future__ import annotations

import pytest
import torch

from tests.support.executors import Executor
from tests.support.matrix import SMALL, Case, call, check, make


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_single(case: Case, executor: Executor) -> None:
    out, lse = call(case, make(case, torch.device(executor.device)), backend=executor.backend)
    result = check(case, out, lse)
    assert result.ok, result.detail
