"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.executors import PARAMS, Executor


@pytest.fixture(params=PARAMS)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """The body of a test runs on the reference, on the emulated architectures and, where there is one, on the GPU."""
    with request.param.active():
        yield request.param
