"""Counters in device memory that synchronise the CTAs of a launch. Every launch leaves its own at zero."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import NamedTuple

import torch

from cute_attn.runtime import capture
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
# One int32 semaphore per CTA: splits that have arrived. Up to 8 CTAs on each of 144 SMs.
SEMAPHORES = PoolSize(4608, 1 << 8, 1 << 12)


class Counters:
    """Pool of counters on one GPU.

    Launches on one stream run one after the other and share counters; every captured launch has its own, because its
    graph may be replayed on any stream. On the CPU all launches, which are emulated, run one after the other.
    """

    def __init__(self, device_index: int, size: PoolSize) -> None:
        if device_index == CPU:
            size = size._replace(streams=1, captured=0)
        self.size, words = size, (size.streams + size.captured) * size.bytes_per_launch // 4
        device = torch.device("cpu") if device_index == CPU else torch.device("cuda", device_index)
        zeros = functools.partial(torch.zeros, words, dtype=torch.int32, device=device)
        self.memory: torch.Tensor = capture.outside(device, zeros)
        self._base = self.memory.data_ptr()
        self._index_of_stream: dict[int, int] = {}  # at most `size.streams`
        self._lock = threading.Lock()
        self._captures = itertools.count()  # `next` is one step for all threads

    def address(self, stream: int) -> int:
        """Returns the address of the counters for a launch on `stream`."""
        size = self.size
        if size.captured and torch.cuda.is_current_stream_capturing():
            index = size.streams + next(self._captures) % size.captured
            return self._base + size.bytes_per_launch * index
        indices = self._index_of_stream
        stream_index = indices.get(stream)
        if stream_index is None:  # it gets an index of its own, or that of the stream that has had its index longest
            with self._lock:
                full = len(indices) >= size.streams
                made = indices.pop(next(iter(indices))) if full and stream not in indices else len(indices)
                stream_index = indices.setdefault(stream, made)
        return self._base + size.bytes_per_launch * stream_index


def of_device(device_index: int, size: PoolSize = TILE_COUNTERS) -> Counters:
    """Returns the pool of a device, allocated on first use."""
    key = device_index, size
    with _making:
        if key not in _pools:
            _pools[key] = Counters(device_index, size)
        return _pools[key]


_making = threading.RLock()
_pools: dict[tuple[int, PoolSize], Counters] = {}
