"""Counters in device memory: no two streams share them, whatever threads ask at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from cute_attn.runtime import capture, counters
from cute_attn.runtime.counters import Counters, PoolSize
from tests.support.threads import in_threads

SIZE = PoolSize(8, 64, 32)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Pools are on the CPU; the last element says whether the current stream is being captured."""
    state = [False]
    zeros = torch.zeros
    monkeypatch.setattr(counters.capture, "outside", lambda index, make: make())
    monkeypatch.setattr(counters.torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[-1])
    return state


class SlowDict(dict[int, int]):
    """Another thread gets a turn between the length and the store."""

    def __len__(self) -> int:
        length = super().__len__()
        threading.Event().wait(1e-4)
        return length


def test_threads_get_distinct_counters_for_distinct_streams(captured: list[bool]) -> None:
    pool = Counters(0, SIZE)
    pool._index_of_stream = SlowDict()
    found: list[dict[int, int]] = [{} for _ in range(8)]

    def work(index: int) -> None:
        for stream in range(100 + 8 * index, 108 + 8 * index):
            found[index][stream] = pool.address(stream)
            assert pool.address(stream) == found[index][stream]

    in_threads(work, range(8))
    addresses = [address for thread in found for address in thread.values()]
    assert len(addresses) == len(set(addresses)) == 64


def test_captured_launches_of_threads_have_their_own(captured: list[bool]) -> None:
    pool = Counters(0, SIZE)
    shared = pool.address(7)
    captured.append(True)
    found: list[int] = []
    in_threads(lambda index: found.extend(pool.address(7) for _ in range(8)), range(4))
    assert len({*found}) == 32
    assert shared not in found


def test_streams_beyond_the_pool_take_the_oldest(captured: list[bool]) -> None:
    pool = Counters(0, SIZE)
    first = [pool.address(stream) for stream in range(64)]
    assert [pool.address(stream) for stream in range(64, 74)] == first[:10]
    assert pool.address(20) == first[20]
    for stream in range(10_000):
        pool.address(1000 + stream)
    assert len(pool._index_of_stream) == 64
    assert sorted(pool._index_of_stream.values()) == list(range(64))


def test_threads_make_one_pool(captured: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def slow(index: int, size: PoolSize) -> Counters:
        made.append(index)
        threading.Event().wait(0.01)
        return Counters(index, size)

    monkeypatch.setattr(counters, "_pools", {})
    monkeypatch.setattr(counters, "Counters", slow)
    found: list[object] = []
    in_threads(lambda index: found.append(counters.of_device(5, SIZE)), range(6))
    assert made == [5]
    assert len({id(pool) for pool in found}) == 1


def test_work_outside_a_capture_avoids_the_captured_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's pool hands out its streams in turn, the captured one among them."""
    pool, current, waited = iter(["captured", "captured", "other"]), ["captured"], []

    @contextlib.contextmanager
    def use(stream: str) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(capture, "relaxed_capture", contextlib.nullcontext)
    for name, stub in {
        "Stream": lambda index: next(pool),
        "stream": use,
        "current_stream": lambda index: SimpleNamespace(synchronize=lambda: waited.append(current[-1])),
        "is_current_stream_capturing": lambda: current[-1] == "captured",
        "device": lambda index: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    assert capture.outside(torch.device("cuda", 0), lambda: current[-1]) == "other"
    assert waited == ["other"]
    assert current == ["captured"]
