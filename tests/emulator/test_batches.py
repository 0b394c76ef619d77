"""The batch wrappers over fa2's host code and its kernels on the emulator."""

from __future__ import annotations

import functools

import pytest

from tests.support.batch_case import SMALL, BatchCase, features
from tests.support.cover import needed
from tests.support.persistent_emulated import CUDA
from tests.support.right import emulate

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("case", needed(SMALL, functools.partial(features, device=CUDA)), ids=lambda case: case.id)
def test_batch(case: BatchCase) -> None:
    emulate(case, "sm_90a", "fa2")
