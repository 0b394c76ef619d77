"""fp8 queries on a Hopper GPU: every element within what the rounding of probabilities explains."""

from __future__ import annotations

import pytest
import torch

from cute_attn.dispatch import capabilities, select
from cute_attn.runtime import arch as archs
from tests.support import fp8_case
from tests.support.fp8_case import CUT, LARGE, LONG, SMALL, VARIED, Fp8Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("case", [*SMALL, *VARIED, *CUT, *LONG, *LARGE], ids=lambda case: case.id)
def test_fp8(case: Fp8Case) -> None:
    arch = archs.for_device(torch.cuda.current_device())
    if select.reasons_against(capabilities.BY_NAME["fa3"], case.features(torch.device("cuda")), arch):
        pytest.skip(f"{arch.name} has no fp8 kernel")
    fp8_case.solve(case, "auto", "cuda")
