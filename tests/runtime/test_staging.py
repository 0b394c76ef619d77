"""Uploads of plan records, with copies that end only when the host waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver as real

from cute_attn.errors import RuntimeArgumentError
from cute_attn.runtime import launch
from cute_attn.runtime.staging import MIN_CAPACITY, CudaCopies, Staging, is_capturing
from tests.support.stub_driver import SUCCESS, StubDriver

CPU = torch.device("cpu")


class LateCopies:
    """Runs copies in stream order, each as late as possible: when the host waits for that copy or a later one."""

    def __init__(self) -> None:
        self.pending: list[tuple[LateEvent, torch.Tensor, torch.Tensor]] = []
        self.buffers: list[torch.Tensor] = []
        self.waits = 0
        self.arrived: list[list[int]] = []  # what the stream saw after each copy

    def buffer(self, size: int) -> torch.Tensor:
        self.buffers.append(torch.full((size,), -7, dtype=torch.int32))
        return self.buffers[-1]

    def target(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def start(self, target: torch.Tensor, source: torch.Tensor, ints: int) -> LateEvent:
        event = LateEvent(self)
        self.pending.append((event, target[:ints], source[:ints]))
        return event

    def finish(self, until: LateEvent | None = None) -> None:
        while self.pending and (until is None or any(event is until for event, _, _ in self.pending)):
            _, target, source = self.pending.pop(0)
            target.copy_(source)
            self.arrived.append(target.tolist())


class LateEvent:
    def __init__(self, copies: LateCopies) -> None:
        self.copies = copies

    def synchronize(self) -> None:
        self.copies.waits += 1
        self.copies.finish(self)


def numbers(seed: int, size: int = 10) -> np.ndarray:
    return np.arange(seed, seed + size, dtype=np.int32)


def uploaded(staging: Staging, ints: np.ndarray) -> torch.Tensor:
    memory = staging.upload(ints)
    staging.send()
    return memory


@pytest.mark.parametrize("target", [None, torch.zeros(12, dtype=torch.int32)], ids=["own memory", "a caller's buffer"])
def test_successive_plans_do_not_overwrite_what_is_being_copied(target: torch.Tensor | None) -> None:
    """Two uploads do not wait, and each later one waits for the last but one alone."""
    copies = LateCopies()
    staging = Staging(CPU, copies, target)
    for seed in range(5):
        ints = numbers(100 * seed).astype(np.int32 if target is None else np.int64)
        uploaded(staging, ints)
        ints[:] = -1  # the caller's array is free again
        assert (copies.waits, len(copies.arrived)) == (max(0, seed - 1),) * 2
    uploaded(staging, numbers(0, 0))
    assert len(copies.buffers) == 2
    copies.finish()
    assert copies.arrived[:5] == [numbers(100 * seed).tolist() for seed in range(5)]
    assert target is None or target.tolist() == [*range(400, 410), 0, 0]


def test_arrays_are_uploaded_one_behind_the_other() -> None:
    staging = Staging(CPU)
    memory = staging.upload(numbers(1), numbers(0, 0), np.arange(1 << 32, (1 << 32) + 3))
    staging.send()
    assert memory[:13].tolist() == [*range(1, 11), 0, 1, 2]


def test_growth_keeps_copies_in_flight() -> None:
    copies = LateCopies()
    staging = Staging(CPU, copies)
    sizes = [3, MIN_CAPACITY + 1, 2, 5 * MIN_CAPACITY, MIN_CAPACITY]
    for seed, size in enumerate(sizes):
        assert uploaded(staging, numbers(seed, size)).numel() >= size
    copies.finish()
    assert copies.arrived == [numbers(seed, size).tolist() for seed, size in enumerate(sizes)]


def test_a_fixed_capacity_keeps_the_address() -> None:
    """Of uploads, and of records that a kernel writes."""
    staging = Staging(CPU)
    addresses = set()
    for size in (20, 1, 13):
        result = staging.upload(numbers(size, size), fixed=True)
        staging.send()
        assert result[:size].tolist() == numbers(size, size).tolist()
        records, *_ = staging.written_on_device(2 * size, size, "layout", fixed=True)
        addresses |= {result.data_ptr(), records.data_ptr()}
    assert len(addresses) == 2
    with pytest.raises(RuntimeArgumentError, match="at most the 20 int32 numbers of its first plan, got 21"):
        uploaded(staging, numbers(0, 21))
    with pytest.raises(RuntimeArgumentError, match="got 41"):
        staging.written_on_device(41, 20, "layout", fixed=True)


def test_what_is_not_sent_leaves_the_numbers_before() -> None:
    """Even where it needed more memory, or memory of a fixed address."""
    staging = Staging(CPU)
    before = uploaded(staging, numbers(7))
    written: list[str] = []
    for prepare in (
        lambda: staging.upload(numbers(1)),
        lambda: staging.upload(numbers(1, 2 * MIN_CAPACITY)),
        lambda: staging.upload(numbers(1, 3 * MIN_CAPACITY), fixed=True),
        lambda: staging.written_on_device(10, 10, "layout"),
        lambda: staging.write(lambda: written.append("by a kernel")),
    ):
        prepare()
        staging.discard()
        staging.send()
        assert staging.uploaded is before
        assert before[:10].tolist() == numbers(7).tolist()
    assert not written
    assert uploaded(staging, numbers(2, 5 * MIN_CAPACITY)) is not before  # whose size is not fixed


def test_a_kernel_writes_after_what_was_prepared_before() -> None:
    staging, seen = Staging(CPU), []
    staging.upload(numbers(7))
    records, scratch, fresh = staging.written_on_device(10, 4, "layout")
    staging.write(lambda: seen.append([*staging.uploaded[:2].tolist(), records.numel() >= 10, scratch.numel() >= 4]))
    staging.write_within(lambda: contextlib.nullcontext(seen.append("entered")))
    assert fresh
    assert seen == []
    staging.send()
    assert seen == ["entered", [7, 8, True, True]]


def test_memory_that_a_kernel_has_written_is_known_by_its_layout() -> None:
    """What was not sent was not written."""
    staging = Staging(CPU)
    found = []
    for size, layout, sent in zip((10, 10, 10, 10, 1 << 20), "aabaa", (True, True, False, True, True), strict=True):
        *_, fresh = staging.written_on_device(size, 4, layout)
        (staging.send if sent else staging.discard)()
        found.append(fresh)
    assert found == [True, False, True, False, True]


DEVICE = torch.device("cuda", 1)


class CopyDriver(StubDriver):
    """Records copies and events with the context in which they are made; that of `DEVICE` is 0x1001."""

    def cuMemcpyHtoDAsync(self, *arguments: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append((int(self.contexts[-1]), "copy", *arguments))
        return (SUCCESS,)

    def cuEventRecord(self, *arguments: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append((int(self.contexts[-1]), "record", *arguments))
        return (SUCCESS,)

    def new_event(self) -> Any:
        def record(stream: str) -> None:
            self.calls.append((int(self.contexts[-1]), "record", stream))

        return SimpleNamespace(cuda_event=5, record=record, synchronize=lambda: self.calls.append(("wait",)))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> CopyDriver:
    """The context of device 0 is current."""
    made, stubs = CopyDriver(()), {"current_stream": str, "is_current_stream_capturing": lambda: False}
    stubs |= {"Event": made.new_event, "device": lambda index: {1: contextlib.nullcontext()}[index]}
    monkeypatch.setattr(launch, "load_driver", lambda: made)
    monkeypatch.setattr(launch, "current_stream", lambda index: 70 + index)
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return made


@pytest.mark.parametrize("current", [0x1000, 0x1001])
def test_cuda_copies_are_followed_by_an_event_on_the_stream_of_their_device(current: int, driver: CopyDriver) -> None:
    """In the context of the copies' device. A wait spares the captures of other threads, which a wait in their mode, as
    of the garbage collector that frees a wrapper, would invalidate.
    """
    source, target, driver.contexts = torch.arange(5), torch.zeros(5), [real.CUcontext(current)]
    copies = CudaCopies(DEVICE)
    end = copies.start(target, source, 5)
    assert copies.start(target, source, 5) is end
    copy = "copy", target.data_ptr(), source.data_ptr(), target.nbytes, 71
    on = 0x1001
    assert driver.calls == [(on, *copy), (on, "record", "cuda:1"), (on, *copy), (on, "record", 5, 71)]
    assert [int(context) for context in driver.contexts] == [current]
    driver.calls.clear()
    end.synchronize()
    assert driver.calls == [("capture mode", "RELAXED"), ("wait",), ("capture mode", "GLOBAL")]


def test_copies_are_not_captured(driver: CopyDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must not be captured"):
        CudaCopies(DEVICE).start(torch.zeros(5), torch.arange(5), 5)
    assert driver.calls == []


def test_the_stream_of_the_device_says_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is current."""
    current = [torch.device("cuda", 0)]

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].index == 1)
    assert [is_capturing(torch.device(name)) for name in ("cuda:0", "cuda:1", "cpu")] == [False, True, False]
