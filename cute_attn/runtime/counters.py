"""Counters in device memory, through which the CTAs of a launch agree. Every launch leaves its own at zero."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

from cute_attn.runtime.launch import CPU


class Kind(NamedTuple):
    """`nbytes` of a launch; `captured`: launches in CUDA graphs until one shares with another that may be replayed
    beside it."""

    nbytes: int
    streams: int
    captured: int


TICKETS = Kind(8, 1 << 12, 1 << 16)  # two int32: CTAs draw their work
ARRIVALS = Kind(4096, 1 << 8, 1 << 12)  # an int32 a CTA: parts of a sum that have arrived


class Counters:
    """Launches on one stream follow each other and share; those in a graph have their own: any stream may replay it."""

    def __init__(self, device_index: int, kind: Kind) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first call of a kind prepares device memory: run it once before the capture")
        self.kind, words = kind, (kind.streams + kind.captured) * kind.nbytes // 4
        self.memory = torch.zeros(words, dtype=torch.int32, device=f"cuda:{device_index}")
        torch.cuda.current_stream(device_index).synchronize()  # other streams may be the first to use them
        self._base = self.memory.data_ptr()
        self._of_stream: dict[int, int] = {}
        self._captures = itertools.count()

    def address(self, stream: int) -> int:
        if torch.cuda.is_current_stream_capturing():
            return self._base + self.kind.nbytes * (self.kind.streams + next(self._captures) % self.kind.captured)
        place = self._of_stream.get(stream)
        if place is None:
            place = self._of_stream[stream] = len(self._of_stream) % self.kind.streams
        return self._base + self.kind.nbytes * place


class OnCpu:
    """What emulated launches share: they run one after the other."""

    def __init__(self, kind: Kind) -> None:
        self.memory = torch.zeros(kind.nbytes // 4, dtype=torch.int32)

    def address(self, stream: int) -> int:
        return self.memory.data_ptr()


def of_device(device_index: int, kind: Kind = TICKETS) -> Counters | OnCpu:
    return _of_device(device_index, kind)


@functools.cache
def _of_device(device_index: int, kind: Kind) -> Counters | OnCpu:
    return OnCpu(kind) if device_index == CPU else Counters(device_index, kind)
