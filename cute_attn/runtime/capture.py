"""First use of a kernel during the capture of a CUDA graph: memory that it makes stays out of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from cute_attn.runtime.launch import relaxed_capture

STREAMS = 32  # of one priority in torch's pool, which hands them out in turn


@contextlib.contextmanager
def outside(device_index: int) -> Iterator[None]:
    """Has torch work on a stream of the device that is not captured. At the end the work is done, so that any stream
    may use what it made. That memory must stay allocated: graphs do not know of it.
    """
    with relaxed_capture(), torch.cuda.stream(_uncaptured_stream(device_index)):
        yield
        torch.cuda.current_stream(device_index).synchronize()


def _uncaptured_stream(device_index: int) -> torch.cuda.Stream:
    """Returns a stream of torch's pool. The pool may hand out the very stream that is captured."""
    for _ in range(STREAMS):
        stream = torch.cuda.Stream(device_index)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
    raise RuntimeError("every stream of torch's pool is being captured: call the kernel once before the captures")
