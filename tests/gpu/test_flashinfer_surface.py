"""Every call of FlashInfer's table once on a GPU: the numbers are those of the reference."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import marks
from tests.support.flashinfer_calls import ENTRY_OF, calls

pytestmark = marks.SM80


@pytest.mark.parametrize("name", ENTRY_OF)
def test_as_on_the_cpu(name: str) -> None:
    expected, found = (calls(device)[name]("", {}) for device in ("cpu", "cuda"))
    assert len(found) == len(expected)
    for on_gpu, on_cpu in zip(found, expected, strict=True):
        assert on_gpu.is_cuda
        tolerance = 2e-2 if on_cpu.dtype == torch.bfloat16 else 4e-3
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=tolerance, atol=tolerance)
