"""Page numbers: their conversion to the int32 that kernels read, and checks of them on the device.

Kernels trust page numbers, and a wrong one is an illegal access that ends the process. With `CUTE_ATTN_VALIDATE=1` they
are checked before every launch, which costs a synchronisation, and a wrong one raises an error while the CUDA context
is still usable.
"""

from __future__ import annotations

import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import BatchLengths, BatchProblem
from cute_attn.request.caches import UsedPages

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
    page_size, window_left, unseen = problem.settings.page_size, problem.settings.window_left, None
    used = UsedPages.of(lengths.kv_len, lengths.kv_start, page_size)
    ids = used.take(problem.kv_indices)
    if window_left >= 0:
        unseen = (ids == -1) & used.before(lengths.kv_len - lengths.qo_len - window_left, page_size, ids.device)
    used.check(ids, problem.k.shape[0], "paged_kv_indices[{entry}]", unseen)
