"""Takes the records of a plan to the device: one copy an upload, and no wait unless two copies are still under way."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from cute_attn.errors import RuntimeArgumentError

LEAST = 4096  # ints of a buffer that may grow


class Event(Protocol):
    """What marks the end of a copy."""

    def synchronize(self) -> Any: ...


class Copies(Protocol):
    """How numbers get from the host to the device."""

    def buffer(self, size: int) -> torch.Tensor:
        """int32 host memory that a copy may read while the host goes on."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy in the order of the device's current stream; until the event, `source` must not change."""


class CudaCopies:
    """Asynchronous copies out of pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        stream = torch.cuda.current_stream(self.device)
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():  # every replay would copy whatever the host memory then holds
                raise RuntimeError("plan() cannot be captured in a CUDA graph: plan before the capture, capture run()")
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event


class HostCopies:
    """Where the device is the host: a copy has ended when it returns."""

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        target.copy_(source)
        return _ENDED


class _Ended:
    def synchronize(self) -> None:
        """Nothing to wait for."""


_ENDED = _Ended()


def _capacity(size: int) -> int:
    return max(LEAST, 1 << (size - 1).bit_length())


class _Lane:
    """Host memory and the copy that may still read it."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.memory: torch.Tensor | None = None
        self.array = np.empty(0, np.int32)  # the same memory
        self.copied: Event = _ENDED

    def reserve(self, size: int) -> np.ndarray:
        """Memory for `size` numbers that no copy reads any more."""
        self.copied.synchronize()
        if self.memory is None or self.memory.numel() < size:
            self.memory = self.copies.buffer(_capacity(size))
            self.array = self.memory.numpy()
        return self.array[:size]

    def send(self, target: torch.Tensor) -> None:
        assert self.memory is not None  # reserved
        self.copied = self.copies.start(target, self.memory[: target.numel()])


class Staging:
    """Int32 numbers on `device`: those of the latest upload.

    Uploads follow the order of the device's current stream: work submitted to it before an upload still finds the
    numbers of the one before. Two pieces of host memory take turns, so that the host may plan again at once; only a
    third upload waits for the first one's copy.
    """

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        if copies is None:
            copies = CudaCopies(device) if device.type == "cuda" else HostCopies()
        self.device = device
        self._lanes = [_Lane(copies), _Lane(copies)]
        self._target = torch.empty(0, dtype=torch.int32, device=device)
        self._fixed = False
        self._reserved: np.ndarray | None = None

    def fixed_capacity(self, ints: int) -> None:
        """From now on every upload lands at the same address, and has `ints` numbers at most (CUDA graphs)."""
        if self._fixed:
            self._check(ints)
            return
        self._target = torch.zeros(ints, dtype=torch.int32, device=self.device)
        self._fixed = True

    def reserve(self, size: int) -> np.ndarray:
        """Memory for the numbers of the next upload, which then need not be copied on the host. Numbers in it are
        anything."""
        self._reserved = self._lanes[0].reserve(size)
        return self._reserved

    def upload(self, ints: np.ndarray) -> torch.Tensor:
        """Start to copy a flat int32 array, which may change as soon as this returns (one of `reserve`: must not). The
        result is a view of memory that the next upload overwrites."""
        if ints.size > self._target.numel():
            self._check(ints.size)
            self._target = torch.empty(_capacity(ints.size), dtype=torch.int32, device=self.device)
        target = self._target[: ints.size]
        if ints.size:
            if ints is not self._reserved:
                self.reserve(ints.size)[:] = ints
            self._lanes[0].send(target)
            self._lanes.reverse()
        self._reserved = None
        return target

    def _check(self, ints: int) -> None:
        room = self._target.numel()
        if self._fixed and ints > room:
            raise RuntimeArgumentError(
                f"the plan of a CUDA graph must fit the {room} int32 numbers of its first plan, got {ints}"
            )
