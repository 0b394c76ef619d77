"""Page numbers: their conversion to the int32 that kernels read, and checks of them on the device.

Kernels trust page numbers, and a wrong one is an illegal access that ends the process. With `CUTE_ATTN_VALIDATE=1` they
are checked before every launch, which costs a synchronisation, and a wrong one raises an error while the CUDA context
is still usable.
"""

from __future__ import annotations

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import BatchLengths, BatchProblem

MAX_PAGE = torch.iinfo(torch.int32).max


def check_host_range(name: str, indices: torch.Tensor, used: slice) -> None:
    """Raise ArgumentError if one of the used int64 page numbers on the CPU does not fit int32."""
    pages = indices[used]
    bad = (pages < -1) | (pages > MAX_PAGE)
    if bool(bad.any()):
        i = int(bad.int().argmax())
        raise ArgumentError(
            f"{name}[{used.start + i}] must be a page within 0..{MAX_PAGE}, or -1 where no query sees it, "
            f"got {int(pages[i])}"
        )


def as_int32(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return page numbers as kernels read them: int32 on `device`, without gaps.

    On a GPU, numbers beyond int32 become the largest one, which is no page of any cache: they must not wrap to pages
    that are.
    """
    if indices.dtype == torch.int64 and not indices.is_cpu:
        indices = indices.clamp(-1, MAX_PAGE)
    return indices.to(device, torch.int32).contiguous()


def before_launch(problem: BatchProblem, lengths: BatchLengths) -> None:
    """Check the pages of a launch, unless the stream is being captured: nothing can be read from the device then."""
    if problem.q.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        pages(problem, lengths)


def pages(problem: BatchProblem, lengths: BatchLengths) -> None:
    """Raise ArgumentError if a request has a page that is not in the cache. Pages before its window may be -1."""
    assert problem.kv_indices is not None
    device, page_size, window_left = problem.q.device, problem.settings.page_size, problem.settings.window_left
    counts = -(-lengths.kv_len // page_size)
    first = np.cumsum(counts) - counts
    request = np.repeat(np.arange(len(counts)), counts)
    entries = np.arange(len(request)) + (lengths.kv_start - first)[request]  # of kv_indices
    page_ids = problem.kv_indices[torch.from_numpy(entries).to(device)]
    num_pages = problem.k.shape[0]
    bad = (page_ids < 0) | (page_ids >= num_pages)
    if window_left >= 0:
        hidden = np.maximum(lengths.kv_len - lengths.qo_len - window_left, 0) // page_size  # pages of every request
        before = np.arange(len(request)) - first[request] < hidden[request]
        bad &= (page_ids != -1) | ~torch.from_numpy(before).to(device)
    if not bool(bad.any()):
        return
    i = int(bad.nonzero()[0])
    where = int(request[i]), int(i - first[request[i]])
    raise wrong(f"paged_kv_indices[{entries[i]}]", where, page_ids[i], num_pages)


def wrong(name: str, where: tuple[int, int], page: torch.Tensor, num_pages: int) -> ArgumentError:
    """Return the error for a page that the cache does not have. `where`: its request and its place among the pages."""
    pages = f"pages 0..{num_pages - 1}" if num_pages else "no pages"
    return ArgumentError(f"{name}, page {where[1]} of request {where[0]}, is {int(page)}; the cache has {pages}")
