"""Counters in device memory from which the CTAs of a launch draw their work. Every launch leaves its own at zero."""

from __future__ import annotations

import functools
import itertools

import torch

from cute_attn.runtime.launch import CPU

BYTES = 8  # two int32
STREAMS = 1 << 12
CAPTURED = 1 << 16  # launches in CUDA graphs until one shares with another that may be replayed beside it


class Counters:
    """Launches on one stream follow each other and share; those in a graph have their own: any stream may replay it."""

    def __init__(self, device_index: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first call of a kind prepares device memory: run it once before the capture")
        self.memory = torch.zeros((STREAMS + CAPTURED) * BYTES // 4, dtype=torch.int32, device=f"cuda:{device_index}")
        torch.cuda.current_stream(device_index).synchronize()  # other streams may be the first to use them
        self._base = self.memory.data_ptr()
        self._of_stream: dict[int, int] = {}
        self._captures = itertools.count()

    def address(self, stream: int) -> int:
        if torch.cuda.is_current_stream_capturing():
            return self._base + BYTES * (STREAMS + next(self._captures) % CAPTURED)
        place = self._of_stream.get(stream)
        if place is None:
            place = self._of_stream[stream] = len(self._of_stream) % STREAMS
        return self._base + BYTES * place


class OnCpu:
    """What emulated launches share: they run one after the other."""

    def __init__(self) -> None:
        self.memory = torch.zeros(BYTES // 4, dtype=torch.int32)

    def address(self, stream: int) -> int:
        return self.memory.data_ptr()


@functools.cache
def of_device(device_index: int) -> Counters | OnCpu:
    return OnCpu() if device_index == CPU else Counters(device_index)
