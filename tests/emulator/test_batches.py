"""The batch wrappers over fa2's host code and its kernels on the emulator."""

from __future__ import annotations

import pytest

from cute_attn.emulator import using
from tests.support.batch_case import SMALL, BatchCase, call, check, make

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_batch(case: BatchCase, arch: str) -> None:
    inputs = make(case)
    with using(arch, kernels="fa2"):
        out, lse = call(case, inputs, backend="emulator")
    result = check(case, inputs, out, lse)
    assert result.ok, result.detail
