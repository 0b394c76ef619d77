"""Counters in device memory that synchronise the CTAs of a launch. Every launch leaves its own at zero."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

from cute_attn.runtime.launch import CPU


class PoolSize(NamedTuple):
    """Size of a pool of counters.

    Streams beyond `streams` share counters with earlier ones, and so do launches in CUDA graphs beyond `captured`:
    two launches that share must not run at the same time.
    """

    bytes_per_launch: int
    streams: int
    captured: int


TILE_COUNTERS = PoolSize(8, 1 << 12, 1 << 16)  # int32 tile counter and CTA counter of the dynamic tile scheduler
SEMAPHORES = PoolSize(4096, 1 << 8, 1 << 12)  # one int32 semaphore per CTA: splits that have arrived


class DeviceCounters:
    """Pool of counters on one GPU.

    Launches on one stream run one after the other and share counters; every captured launch has its own, because its
    graph may be replayed on any stream.
    """

    def __init__(self, device_index: int, size: PoolSize) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first call of a kernel allocates device memory, which a CUDA graph capture does not allow: "
                "make the call once before the capture"
            )
        self.size, words = size, (size.streams + size.captured) * size.bytes_per_launch // 4
        self.memory = torch.zeros(words, dtype=torch.int32, device=f"cuda:{device_index}")
        torch.cuda.current_stream(device_index).synchronize()  # other streams may be the first to use them
        self._base = self.memory.data_ptr()
        self._index_of_stream: dict[int, int] = {}
        self._captures = itertools.count()

    def address(self, stream: int) -> int:
        """Returns the address of the counters for a launch on `stream`."""
        size = self.size
        if torch.cuda.is_current_stream_capturing():
            index = size.streams + next(self._captures) % size.captured
            return self._base + size.bytes_per_launch * index
        stream_index = self._index_of_stream.get(stream)
        if stream_index is None:
            stream_index = self._index_of_stream[stream] = len(self._index_of_stream) % size.streams
        return self._base + size.bytes_per_launch * stream_index


class CpuCounters:
    """Counters of emulated launches, which run one after the other and share them."""

    def __init__(self, size: PoolSize) -> None:
        self.memory = torch.zeros(size.bytes_per_launch // 4, dtype=torch.int32)

    def address(self, stream: int) -> int:
        """Returns the address of the counters."""
        return self.memory.data_ptr()


def of_device(device_index: int, size: PoolSize = TILE_COUNTERS) -> DeviceCounters | CpuCounters:
    """Returns the pool of a device, allocated on first use."""
    return _of_device(device_index, size)


@functools.cache
def _of_device(device_index: int, size: PoolSize) -> DeviceCounters | CpuCounters:
    return CpuCounters(size) if device_index == CPU else DeviceCounters(device_index, size)
