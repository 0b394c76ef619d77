"""Fixtures and tiers of all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.support.executors import DEVICES, PARAMS, Executor
from tests.support.launch_corpus import RecordingDriver, pretended
from tests.support.tiers import long_items

gc.disable()  # until all tests are collected: a fifth of that time


@pytest.fixture(params=PARAMS)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """The body of a test runs on the reference, on the emulated architectures and, where there is one, on the GPU."""
    with request.param.active():
        yield request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """What needs no emulated kernels, such as engines' calls, runs on CPU tensors and, as it stands, on a GPU."""
    name: str = request.param
    return name


@pytest.fixture
def driver() -> Iterator[RecordingDriver]:
    """A pretended H100, whose launches are recorded."""
    recording = RecordingDriver()
    with pretended(recording):
        yield recording


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the quick tier leaves out."""
    for item in long_items(items):
        item.add_marker("long")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare garbage collections the 20,000 tests and all modules: they took 8 % of the time of emulated tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
