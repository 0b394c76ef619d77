"""The batch wrappers over fa2's host code and its kernels on the emulator."""

from __future__ import annotations

import pytest

from tests.support.batch_case import SMALL, BatchCase
from tests.support.right import emulate

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_batch(case: BatchCase, arch: str) -> None:
    emulate(case, arch, "fa2")
