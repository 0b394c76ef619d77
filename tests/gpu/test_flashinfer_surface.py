"""Every call of FlashInfer's table once on a GPU: the numbers are those of the reference."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import marks
from tests.support.flashinfer_calls import Calls

pytestmark = marks.SM80

NAMES = list(Calls("cpu").by_name())


@pytest.mark.parametrize("name", NAMES)
def test_as_on_the_cpu(name: str) -> None:
    expected = Calls("cpu").by_name()[name]("", {})
    found = Calls("cuda").by_name()[name]("", {})
    assert len(found) == len(expected)
    for on_gpu, on_cpu in zip(found, expected, strict=True):
        assert on_gpu.is_cuda
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=4e-3, atol=4e-3)
