"""`integrations.distributed` on four ranks over gloo, of which some cases use two."""

from __future__ import annotations

import pytest
import torch

from cute_attn import ArgumentError
from cute_attn.integrations import distributed
from tests.support import distributed_cases, process_group


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return process_group.run(distributed_cases.__name__, 4, "cpu")


@pytest.mark.parametrize("case", distributed_cases.cases("cpu"))
def test_on_ranks(case: str, outcomes: dict[str, str]) -> None:
    if outcomes[case] != process_group.PASSED:
        pytest.fail(outcomes[case], pytrace=False)


def test_without_process_group() -> None:
    x = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"call torch\.distributed\.init_process_group first"):
        distributed.ring_prefill(x, x, x)
