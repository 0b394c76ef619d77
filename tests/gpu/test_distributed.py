"""The cases of `integrations.distributed` on two GPUs over NCCL, captured runs among them."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import marks
from tests.support import distributed_cases, process_group

pytestmark = [
    *marks.SM80,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return process_group.run(distributed_cases.__name__, 2, "cuda")


@pytest.mark.parametrize("case", distributed_cases.cases("cuda"))
def test_on_ranks(case: str, outcomes: dict[str, str]) -> None:
    if outcomes[case] != process_group.PASSED:
        pytest.fail(outcomes[case], pytrace=False)
