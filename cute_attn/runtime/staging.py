"""Copies what plans upload to the device, double-buffered: one copy per upload, which waits only if two copies are
still in flight.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import RuntimeArgumentError
from cute_attn.runtime import capture, launch

MIN_CAPACITY = 4096  # int32 numbers of a buffer that may grow
DEVICE_CAPACITY = 1 << 18  # of one that the planner kernel writes: the host waits where it grows


def is_capturing(device: torch.device) -> bool:
    """Returns True while a CUDA graph of the device's current stream is captured: an upload would be captured too."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class _CopyEnd:
    """The end of a copy. The host may wait for it while any thread captures a CUDA graph, as the garbage collector does
    that frees a wrapper then: in torch's mode of capture a plain wait would invalidate the graph.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def synchronize(self) -> None:
        with launch.relaxed_capture():
            self.event.synchronize()


class Copies:
    """Copies within host memory, which have ended when `start` returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def buffer(self, size: int) -> torch.Tensor:
        """Allocates int32 host memory that a copy may read while the host continues."""
        return torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")

    def target(self, size: int) -> torch.Tensor:
        """Allocates int32 device memory, zeros."""
        zeros = functools.partial(torch.zeros, size, dtype=torch.int32, device=self.device)
        return capture.outside(self.device, zeros)

    def start(self, target: torch.Tensor, source: torch.Tensor, ints: int) -> _CopyEnd | None:
        """Starts to copy `ints` numbers on the device's current stream. `source` must not change before their end."""
        ctypes.memmove(target.data_ptr(), source.data_ptr(), 4 * ints)  # a fifth of the time of `copy_` and its slices
        return None


class CudaCopies(Copies):
    """Host buffers in pinned memory, and asynchronous copies from them to the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._events: dict[int, _CopyEnd] = {}  # by address of the host buffer: two, and those of smaller ones
        self._context: Any = None  # of the device, from the first copy on

    def target(self, size: int) -> torch.Tensor:
        memory = super().target(size)
        memory.record_stream(torch.cuda.current_stream(self.device))  # where uploads and kernels use it
        return memory

    def start(self, target: torch.Tensor, source: torch.Tensor, ints: int) -> _CopyEnd:
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        if self._context is None:
            self._context = launch.primary_context(index)
        if launch.load_driver().cuCtxGetCurrent()[1] == self._context:
            return self._start(target, source, ints, index)
        with torch.cuda.device(index), launch.entered(self._context):
            return self._start(target, source, ints, index)

    def _start(self, target: torch.Tensor, source: torch.Tensor, ints: int, index: int) -> _CopyEnd:
        """Starts a copy on the current device. Calls of the driver take 3 us, where `copy_` and `Event.record` take 12
        (H200 machine): the host buffer waits for the copy before it goes, because torch does not know of it.
        """
        if torch.cuda.is_current_stream_capturing():  # each replay would copy what the host memory holds by then
            raise RuntimeError(
                "plan() must not be captured in a CUDA graph: call plan() before the capture and capture run()"
            )
        driver, stream, address = launch.load_driver(), launch.current_stream(index), source.data_ptr()
        copied = driver.cuMemcpyHtoDAsync(target.data_ptr(), address, 4 * ints, stream)
        launch.checked("cuMemcpyHtoDAsync", copied)
        event = self._events.get(address)
        if event is None:
            event = self._events[address] = _CopyEnd()
            event.event.record(torch.cuda.current_stream(self.device))  # creates it
        else:
            launch.checked("cuEventRecord", driver.cuEventRecord(event.event.cuda_event, stream))
        return event


def _capacity(size: int) -> int:
    return 1 << (max(size, MIN_CAPACITY) - 1).bit_length()


class _HostBuffer:
    """One of the two host buffers, and the copy that may still read it."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.memory: torch.Tensor | None = None
        self.array = np.empty(0, np.int32)  # the same memory
        self.copy_done: _CopyEnd | None = None

    def reserve(self, size: int) -> np.ndarray:
        """Returns memory for `size` numbers, after the copy that reads it has ended."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
        if self.array.size < size:
            self.memory = self.copies.buffer(_capacity(size))
            self.array = self.memory.numpy()
        return self.array[:size]

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as the interpreter ends, CUDA may be gone
            if self.copy_done is not None:
                self.copy_done.synchronize()

    def send(self, target: torch.Tensor, ints: int) -> None:
        assert self.memory is not None  # reserved
        self.copy_done = self.copies.start(target, self.memory, ints)


class Area(NamedTuple):
    """Device memory of int32 numbers."""

    memory: torch.Tensor
    fixed: bool = False  # the address and the size stay


class Areas(NamedTuple):
    """Device memory of a plan."""

    uploaded: Area
    records: Area  # that the planner kernel writes
    scratch: Area  # that only the planner kernel reads
    layout: object = None  # of what it has written in both


class Staging:
    """int32 numbers on `device`, replaced by every plan.

    `upload`, `written_on_device` and `write` prepare a plan: they return where its numbers will be, and the numbers of
    the previous one stay. `send` replaces these, `discard` forgets what was prepared. So a plan of several schedules
    writes none of them before all are made.

    Copies run on the device's current stream: work submitted to it before `send` still reads the numbers of the
    previous plan. The host side is double-buffered, so that the host may plan again at once; only a third upload waits
    for the copy of the first.
    """

    def __init__(self, device: torch.device, copies: Copies | None = None, target: torch.Tensor | None = None) -> None:
        """`target`: device memory of the caller, where the uploads of all plans are to be."""
        copies = copies or (CudaCopies if device.type == "cuda" else Copies)(device)
        self.device, self._copies = device, copies
        self._buffers = [_HostBuffer(copies), _HostBuffer(copies)]
        with capture.lasting():
            empty = Area(torch.empty(0, dtype=torch.int32, device=device))
        uploaded = empty if target is None else Area(target, fixed=True)
        self._sent = self._next = Areas(uploaded, empty, empty)
        self._writes: list[Callable[[], Any]] = []  # that `send` makes

    @property
    def uploaded(self) -> torch.Tensor:
        """Device memory of what the host uploads, which a larger plan replaces unless its address is fixed."""
        return self._next.uploaded.memory

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """All device memory: of uploads, of records, and scratch."""
        return tuple(area.memory for area in self._next[:3])

    @property
    def host_memory(self) -> torch.Tensor:
        """Host memory that the next upload may use; empty before the second."""
        memory = self._buffers[0].memory
        return torch.empty(0, dtype=torch.int32, device="cpu") if memory is None else memory

    def upload(self, *arrays: np.ndarray, fixed: bool = False) -> torch.Tensor:
        """Prepares a copy of flat arrays, one behind the other as int32 numbers, to the front of the device memory, and
        returns that memory. `fixed`: its address and its size stay from now on, as CUDA graphs need it.

        The caller may change the arrays afterwards.
        """
        size, stop = sum(map(len, arrays)), 0
        area = self._area(self._next.uploaded, size, MIN_CAPACITY, fixed)
        if area is not self._next.uploaded:
            self._next = self._next._replace(uploaded=area)
        self._writes.clear()
        if size:
            ints = self._buffers[0].reserve(size)
            for array in arrays:  # in half of the time of `concatenate`
                start, stop = stop, stop + len(array)
                ints[start:stop] = array
            self._writes.append(functools.partial(self._copy, size))
        return area.memory

    def written_on_device(
        self, size: int, scratch: int, layout: object, fixed: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Returns memory for at least `size` numbers, and for `scratch` numbers that no launch but their writer's
        reads; and whether they may hold anything, not what a writer of the same layout has left. `fixed`: the address
        and the size of the former stay.
        """
        before = self._next
        records = self._area(before.records, size, DEVICE_CAPACITY, fixed)
        kept = self._area(before.scratch, scratch, DEVICE_CAPACITY)
        fresh = before.layout != layout or records is not before.records or kept is not before.scratch
        self._next = Areas(before.uploaded, records, kept, layout)
        return records.memory, kept.memory, fresh

    def write(self, function: Callable[[], Any]) -> None:
        """Prepares a call of a function that writes the memory, after what was prepared before."""
        self._writes.append(function)

    def write_within(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Makes what was prepared happen within a context."""
        writes = tuple(self._writes)

        def write() -> None:
            with context():
                for each in writes:
                    each()

        self._writes = [write]

    def send(self) -> None:
        """Writes what was prepared."""
        for write in self._writes:
            write()
        self._writes.clear()
        self._sent = self._next

    def forget_layout(self) -> None:
        """Takes the memory as unwritten: launches that are captured write it in replays."""
        self._next = self._next._replace(layout=None)

    def discard(self) -> None:
        """Forgets what was prepared, also if `send` has failed."""
        self._writes.clear()
        self._next = self._sent

    def _copy(self, size: int) -> None:
        self._buffers[0].send(self._next.uploaded.memory, size)
        self._buffers.reverse()

    def _area(self, area: Area, size: int, least: int, fixed: bool = False) -> Area:
        """Return an area for `size` numbers: this one, or one with room for at least `least`."""
        capacity = area.memory.numel()
        if area.fixed:
            if size > capacity:
                raise RuntimeArgumentError(
                    f"plan() of a wrapper with CUDA graphs must need at most the {capacity} int32 numbers of its first "
                    f"plan, got {size}"
                )
            return area
        if fixed:
            return Area(self._copies.target(size), fixed=True)
        return area if size <= capacity else Area(self._copies.target(_capacity(max(size, least))))
