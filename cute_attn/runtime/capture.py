"""Memory that outlives the call that makes it, whatever the call runs in: torch's inference mode, the capture of a CUDA
graph or a warm-up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from cute_attn.runtime.launch import relaxed_capture

STREAMS = 32  # of one priority in torch's pool, which hands them out in turn

T = TypeVar("T")


def outside(device: torch.device, make: Callable[[], T]) -> T:
    """Return `make()`, whose work on the device is done, so that any stream may use what it made. That memory must stay
    allocated: graphs do not know of it.

    It is called on a stream that is not captured, and in a thread of its own: torch.compile's warm-ups for CUDA graphs
    have torch allocate whatever their thread asks for from the graphs' pool, where nothing may stay.
    """
    if device.type != "cuda":
        with lasting():
            return make()
    index = torch.cuda.current_device() if device.index is None else device.index

    def call() -> T:
        with torch.cuda.device(index), relaxed_capture(), torch.cuda.stream(_uncaptured_stream(index)):
            made = make()
            torch.cuda.current_stream(index).synchronize()
            return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def lasting() -> torch.inference_mode:
    """Return a context, or decorator, for tensors that outlive the call: those that are made in torch's inference mode
    could only be written in it.
    """
    return torch.inference_mode(False)


def _uncaptured_stream(device_index: int) -> torch.cuda.Stream:
    """Returns a stream of torch's pool. The pool may hand out the very stream that is captured."""
    for _ in range(STREAMS):
        stream = torch.cuda.Stream(device_index)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
    raise RuntimeError("every stream of torch's pool is being captured: call the kernel once before the captures")
