"""Copies the records of plans, and their index arrays, to the device, double-buffered: one copy per upload, which waits
only if two copies are still in flight.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any, Protocol

import numpy as np
import torch

from cute_attn.errors import RuntimeArgumentError
from cute_attn.runtime import capture, launch

MIN_CAPACITY = 4096  # int32 numbers of a buffer that may grow
DEVICE_CAPACITY = 1 << 18  # of one that the planner kernel writes: the host waits where it grows


def is_capturing(device: torch.device) -> bool:
    """Returns True while a CUDA graph of the device's current stream is captured: an upload would be captured too."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Event(Protocol):
    """Marks the end of a copy."""

    def synchronize(self) -> Any: ...


class Copies(Protocol):
    """Host buffers of one kind, and copies from them to the device."""

    def buffer(self, size: int) -> torch.Tensor:
        """Allocates int32 host memory that a copy may read while the host continues."""

    def target(self, size: int) -> torch.Tensor:
        """Allocates int32 device memory, zeros."""

    def start(self, target: torch.Tensor, source: torch.Tensor, ints: int) -> Event:
        """Starts to copy `ints` numbers on the device's current stream. `source` must not change before the event."""


class CudaCopies:
    """Asynchronous copies from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: dict[int, torch.cuda.Event] = {}  # by address of the host buffer: two, and those of smaller ones

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)

    def target(self, size: int) -> torch.Tensor:
        zeros = functools.partial(torch.zeros, size, dtype=torch.int32, device=self.device)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        memory = capture.outside(index, zeros)
        memory.record_stream(torch.cuda.current_stream(self.device))  # where uploads and kernels use it
        return memory

    def start(self, target: torch.Tensor, source: torch.Tensor, ints: int) -> Event:
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        if launch.is_current(index):
            return self._start(target, source, ints, index)
        with torch.cuda.device(index), launch.entered(index):
            return self._start(target, source, ints, index)

    def _start(self, target: torch.Tensor, source: torch.Tensor, ints: int, index: int) -> Event:
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
            event = self._events[address] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))  # creates it
        else:
            launch.checked("cuEventRecord", driver.cuEventRecord(event.cuda_event, stream))
        return event


class HostCopies:
    """Copies within host memory, which have ended when `start` returns."""

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device="cpu")

    def target(self, size: int) -> torch.Tensor:
        with capture.lasting():
            return torch.zeros(size, dtype=torch.int32, device="cpu")

    def start(self, target: torch.Tensor, source: torch.Tensor, ints: int) -> Event:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), 4 * ints)  # a fifth of the time of `copy_` and its slices
        return _COMPLETED


class _CompletedEvent:
    def synchronize(self) -> None:
        """Returns at once."""


_COMPLETED = _CompletedEvent()


def _capacity(size: int) -> int:
    return max(MIN_CAPACITY, 1 << (size - 1).bit_length())


class _HostBuffer:
    """One of the two host buffers, and the copy that may still read it."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.memory: torch.Tensor | None = None
        self.array = np.empty(0, np.int32)  # the same memory
        self.copy_done: Event = _COMPLETED

    def reserve(self, size: int) -> np.ndarray:
        """Returns memory for `size` numbers, after the copy that reads it has ended."""
        self.copy_done.synchronize()
        if self.array.size < size:
            self.memory = self.copies.buffer(_capacity(size))
            self.array = self.memory.numpy()
        return self.array[:size]

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as the interpreter ends, CUDA may be gone
            self.copy_done.synchronize()

    def send(self, target: torch.Tensor, ints: int) -> None:
        assert self.memory is not None  # reserved
        self.copy_done = self.copies.start(target, self.memory, ints)


def _copies_for(device: torch.device) -> Copies:
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class Uploads:
    """Copies of numbers into an int32 tensor, on the device's current stream. Double-buffered like `Staging`, so that
    the caller's array is read before `copy` returns and only a third copy waits for the first.
    """

    def __init__(self, target: torch.Tensor, copies: Copies | None = None) -> None:
        copies = copies or _copies_for(target.device)
        self.target, self._buffers = target, [_HostBuffer(copies), _HostBuffer(copies)]

    def copy(self, numbers: np.ndarray) -> None:
        """Starts to copy numbers, at most as many as the tensor has, to its beginning."""
        if numbers.size:
            self._buffers[0].reserve(numbers.size)[:] = numbers
            self._buffers[0].send(self.target, numbers.size)
            self._buffers.reverse()


class Staging:
    """int32 numbers on `device`, replaced by every upload.

    Uploads run on the device's current stream: work submitted to it before an upload still reads the numbers of the
    previous one. The host side is double-buffered, so that the host may plan again at once; only a third upload waits
    for the copy of the first.
    """

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        copies = copies or _copies_for(device)
        self.device, self._copies = device, copies
        self._buffers = [_HostBuffer(copies), _HostBuffer(copies)]
        with capture.lasting():
            self._device_buffer = torch.empty(0, dtype=torch.int32, device=device)
        self._fixed = False
        self._reserved: np.ndarray | None = None
        self.scratch = self._device_buffer  # of the planner kernel; see `written_on_device`
        self._layout: object = None  # of the numbers, if the planner kernel has written them

    @property
    def memory(self) -> torch.Tensor:
        """Device memory of the numbers, which a larger upload replaces unless the capacity is fixed."""
        return self._device_buffer

    @property
    def host_memory(self) -> torch.Tensor:
        """Host memory that the next upload may use; empty before the second."""
        memory = self._buffers[0].memory
        return torch.empty(0, dtype=torch.int32, device="cpu") if memory is None else memory

    def fix_capacity(self, ints: int) -> None:
        """Fixes the address of all later uploads and limits them to `ints` numbers, as CUDA graphs need it."""
        if self._fixed:
            self._check_capacity(ints)
            return
        self._device_buffer = self._copies.target(ints)
        self._fixed = True

    def reserve(self, size: int) -> np.ndarray:
        """Returns uninitialised memory for the numbers of the next upload, which saves that a copy on the host."""
        self._reserved = self._buffers[0].reserve(size)
        return self._reserved

    def upload(self, ints: np.ndarray) -> torch.Tensor:
        """Starts to copy a flat int32 array to the front of the device memory, which the next upload overwrites, and
        returns that memory.

        The caller may change `ints` afterwards, unless it comes from `reserve`.
        """
        size = ints.size
        if size > self._device_buffer.numel():
            self._check_capacity(size)
            self._device_buffer = self._copies.target(_capacity(size))
        self._layout = None
        if size:
            if ints is not self._reserved:
                self.reserve(size)[:] = ints
            self._buffers[0].send(self._device_buffer, size)
            self._buffers.reverse()
        self._reserved = None
        return self._device_buffer

    def written_on_device(self, size: int, scratch: int, layout: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns memory for `size` numbers, and for `scratch` numbers that no launch but their writer's reads: zeros,
        or what a writer of the same layout has left in both.
        """
        if size > self._device_buffer.numel():
            self._check_capacity(size)
            self._device_buffer, self._layout = self._copies.target(_capacity(max(size, DEVICE_CAPACITY))), None
        if scratch > self.scratch.numel():
            self.scratch, self._layout = self._copies.target(_capacity(max(scratch, DEVICE_CAPACITY))), None
        if self._layout != layout:
            self._device_buffer.zero_()
            self.scratch.zero_()
            self._layout = layout
        return self._device_buffer[:size], self.scratch[:scratch]

    def _check_capacity(self, ints: int) -> None:
        capacity = self._device_buffer.numel()
        if self._fixed and ints > capacity:
            raise RuntimeArgumentError(
                f"plan() of a wrapper with CUDA graphs must need at most the {capacity} int32 numbers of its first "
                f"plan, got {ints}"
            )
