"""Checks of page numbers, which are on the device. Each check costs a synchronisation.

Kernels trust page numbers, and a wrong one is an illegal access that ends the process. With `CUTE_ATTN_VALIDATE=1` they
are checked before every launch, and a wrong one raises an error while the CUDA context is still usable.
"""

from __future__ import annotations

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import BatchLengths, BatchProblem


def before_launch(problem: BatchProblem, lengths: BatchLengths) -> None:
    """Check the pages of a launch, unless the stream is being captured: nothing can be read from the device then."""
    if problem.q.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        pages(problem, lengths)


def pages(problem: BatchProblem, lengths: BatchLengths) -> None:
    """Raise ArgumentError if a request reads a page that is not in the cache."""
    assert problem.kv_indices is not None
    counts = -(-lengths.kv_len // problem.settings.page_size)
    first = np.cumsum(counts) - counts
    request = np.repeat(np.arange(len(counts)), counts)
    entries = np.arange(len(request)) + (lengths.kv_start - first)[request]  # of kv_indices
    page_ids = problem.kv_indices[torch.from_numpy(entries).to(problem.q.device)]
    num_pages = problem.k.shape[0]
    bad = (page_ids < 0) | (page_ids >= num_pages)
    if not bool(bad.any()):
        return
    i = int(bad.nonzero()[0])
    raise ArgumentError(
        f"paged_kv_indices[{entries[i]}], page {i - first[request[i]]} of request {request[i]}, is {int(page_ids[i])}; "
        f"the cache has pages 0..{num_pages - 1}"
    )
