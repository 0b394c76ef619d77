"""Engines' calls run on CPU tensors, and as they stand on a GPU; not on the emulator, which has tests of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.executors import CUDA, GPU_MARKS, REFERENCE, Executor


@pytest.fixture(params=[pytest.param(REFERENCE, id="cpu"), pytest.param(CUDA, id="cuda", marks=GPU_MARKS)])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with request.param.active():
        yield request.param


@pytest.fixture
def device(executor: Executor) -> str:
    return executor.device
