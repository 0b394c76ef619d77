"""Views of paged KV caches in the layout that kernels read, and the page numbers of a batch: where they are, their
conversion to the int32 that kernels read, and checks of them on the device.

Kernels trust page numbers, and a wrong one is an illegal access that ends the process. With `CUTE_ATTN_VALIDATE=1` they
are checked before every launch, which costs a synchronisation, and a wrong one raises an error while the CUDA context
is still usable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.problem import BatchLengths, BatchProblem
from cute_attn.request import checks
from cute_attn.request.checks import Named
from cute_attn.request.settings import KV_LAYOUTS

MAX_PAGE = torch.iinfo(torch.int32).max
LARGE_CACHE = 64 << 30  # bytes of keys, or of values
BITS_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # values are copied as bits, whatever their dtype


def cache_halves(name: str, cache: Any, may_be_one: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a cache in the layout of the caller. `may_be_one`: a tensor with 1 on axis 1 has
    keys that are values too.
    """
    if isinstance(cache, torch.Tensor):
        checks.stored(name, cache)
        if cache.dim() in (4, 5) and cache.shape[1] == 2:
            k, v = cache.unbind(1)
            return k, v
        if may_be_one and cache.dim() == 5 and cache.shape[1] == 1:
            return cache[:, 0], cache[:, 0]
        axis = "1 or 2" if may_be_one else "2"
        raise checks.wrong(f"{name} as one tensor must have shape [num_pages, {axis}, ...]", cache)
    if not isinstance(cache, tuple | list) or len(cache) != 2:
        raise checks.wrong(f"{name} must be a tensor or a pair (k, v)", cache, ArgumentTypeError)
    return checks.tensor(f"k of {name}", cache[0]), checks.tensor(f"v of {name}", cache[1])


def cache_views(name: str, cache: Any, kv_layout: Any, may_be_one: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views [num_pages, page_size, num_kv_heads, n] of the keys and values of a cache."""
    kv_layout = checks.choice("kv_layout", kv_layout, KV_LAYOUTS)
    pair = cache_halves(name, cache, may_be_one)
    k, v = (_cache_view(f"{x} of {name}", half, kv_layout) for x, half in zip("kv", pair, strict=True))
    if v.shape[:3] != k.shape[:3] or v.device != k.device:
        raise ArgumentError(
            f"{name} must have keys and values of the same pages, page size and heads on one device, "
            f"got {checks.describe(pair[0])} and {checks.describe(pair[1])}"
        )
    return k, v


def _cache_view(name: str, cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    if cache.dim() not in (3, 4):
        raise checks.wrong(f"{name} must have 4 dimensions, or 3 with pages of one token", cache)
    if cache.element_size() not in BITS_DTYPES:
        raise checks.wrong(f"{name} must have a dtype of at most 4 bytes", cache)
    if cache.shape[-1] > 1 and cache.stride(-1) != 1:
        raise ArgumentError(f"{name} must have stride 1 on its last axis, got strides {cache.stride()}")
    if cache.dim() == 3:
        return cache.unsqueeze(1)
    view = cache.transpose(1, 2) if kv_layout == "HND" else cache
    if view.shape[1] == 0:
        raise checks.wrong(f"{name} must have a page_size >= 1", cache)
    return view


def tables_with_lengths(
    tables: Named, lengths: Named, device: torch.device | None, dtypes: Sequence[torch.dtype] = (torch.int32,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a page table `[batch_size, max_pages]` and as many lengths, of `dtypes`, on a device; None: on any."""
    pages = checks.operand(*tables, (torch.int32,), (None, None), "[batch_size, max_pages]", device)
    kv_len = checks.operand(*lengths, dtypes, (None,), "[batch_size]", device)
    if len(kv_len) != len(pages):
        expected = f"one length for each of the {len(pages)} rows of {tables[0]}"
        raise checks.wrong(f"{lengths[0]} must have {expected}", kv_len)
    return pages, kv_len


def is_large(x: torch.Tensor) -> bool:
    """Tell whether the pages of k or v span 64 GiB or more."""
    return x.shape[0] * x.stride(0) * x.itemsize >= LARGE_CACHE


# ---- page numbers


class UsedPages(NamedTuple):
    """Where the page numbers of all keys of a batch are in an array of them, request by request."""

    counts: np.ndarray  # [batch_size]
    positions: np.ndarray  # int64, in the array

    @classmethod
    def of(cls, kv_len: np.ndarray, start: np.ndarray, page_size: int) -> UsedPages:
        """Return the pages of requests with so many keys. `start`: position of each request's first page."""
        counts = -(-kv_len // page_size)
        return cls(counts, _places(counts) + np.repeat(start, counts))

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        """Return these page numbers of an array of any shape."""
        return indices.reshape(-1)[torch.from_numpy(self.positions).to(indices.device)]

    def before(self, keys: np.ndarray, page_size: int, device: torch.device) -> torch.Tensor:
        """Tell of every page whether the first `keys` of its request have all that it holds."""
        hidden = np.repeat(np.maximum(keys, 0) // page_size, self.counts)
        return torch.from_numpy(_places(self.counts) < hidden).to(device)

    def check(self, ids: torch.Tensor, num_pages: int, name: str, unseen: torch.Tensor | None = None) -> None:
        """Raise ArgumentError for a page that the cache does not have, unless it is `unseen`. Costs a synchronisation
        on a GPU. `ids`: result of `take`. `name`: of one, with {entry}, its position, or {request} and {place}.
        """
        bad = (ids < 0) | (ids >= num_pages)
        if unseen is not None:
            bad &= ~unseen
        if bool(bad.any()):
            i = int(bad.nonzero()[0])
            request, place = int(np.repeat(np.arange(len(self.counts)), self.counts)[i]), int(_places(self.counts)[i])
            named = name.format(entry=self.positions[i], request=request, place=place)
            pages = f"pages 0..{num_pages - 1}" if num_pages else "no pages"
            raise ArgumentError(f"{named}, page {place} of request {request}, is {int(ids[i])}; the cache has {pages}")


NO_PAGES = UsedPages(*np.empty((2, 0), np.int64))
TABLE_ENTRY = "block_tables[{request}, {place}]"  # name of a page number for `UsedPages.check`


def in_table(tables: torch.Tensor, kv_len: np.ndarray, page_size: int) -> UsedPages:
    """Check that `tables`, a row per request, have room for so many keys, and return where their pages are."""
    batch_size, width = tables.shape
    if batch_size != len(kv_len):
        raise checks.wrong(f"block_tables must have {len(kv_len)} rows, one per request", tables)
    what = f", the {width} pages of block_tables times {page_size} tokens"
    checks.each_within("seq_lens", kv_len, width * page_size, what)
    return UsedPages.of(kv_len, np.arange(len(kv_len)) * width, page_size)


def _places(counts: np.ndarray) -> np.ndarray:
    """Return the place of every page among those of its request."""
    first = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(first, counts)


def as_int32(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return page numbers as kernels read them: int32 on `device`, without gaps.

    On a GPU, numbers beyond int32 become the largest one, which is no page of any cache: they must not wrap to pages
    that are.
    """
    if indices.dtype == torch.int64 and not indices.is_cpu:
        indices = indices.clamp(-1, MAX_PAGE)
    return indices.to(device, torch.int32).contiguous()


def check_pages(problem: BatchProblem, lengths: BatchLengths) -> None:
    """Raise ArgumentError if a request has a page that is not in the cache. Pages before its window may be -1. Nothing
    is checked while the stream is being captured: nothing can be read from the device then.
    """
    if problem.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    assert problem.kv_indices is not None
    page_size, window_left, unseen = problem.settings.page_size, problem.settings.window_left, None
    used = UsedPages.of(lengths.kv_len, lengths.kv_start, page_size)
    ids = used.take(problem.kv_indices)
    if window_left >= 0:
        unseen = (ids == -1) & used.before(lengths.kv_len - lengths.qo_len - window_left, page_size, ids.device)
    used.check(ids, problem.k.shape[0], "paged_kv_indices[{entry}]", unseen)
