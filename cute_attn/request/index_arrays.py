"""The index arrays of a plan, which say where the tokens of each request are, and what they say: `IndexArrays`.

Arrays on the host are read there. Of arrays on a GPU plans check what they can without reading them: types, shapes and
places. What else is checked needs their values; without it the planner kernel keeps within the memory of q, the index
arrays and the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import BatchLengths, DeviceLengths, largest, smallest
from cute_attn.request import caches, checks
from cute_attn.request.settings import MAX_INDEX, MAX_KV_LEN

DTYPES = (torch.int32, torch.int64)
STRIDED = torch.strided


class IndexArrays(NamedTuple):
    """The index arrays of a plan as the user gave them, of a ragged batch without the last three."""

    names: Sequence[str]  # the caller's, of the next four
    qo_indptr: Any
    kv_indptr: Any
    indices: Any = None  # page numbers; they keep their device
    last_page_len: Any = None
    page_size: int | None = None
    q_len: int | None = None  # query tokens of every request, in place of qo_indptr

    def on_host(self) -> BatchLengths:
        """Check the arrays and return what they say. Those on a GPU cost a synchronisation each."""
        names, qo_indptr, kv_indptr, indices, last_page_len, page_size, q_len = self
        q_bounds = qo_len = None
        if q_len is None:
            q_bounds, qo_len, _ = _bounds(names[0], qo_indptr)
        kv_bounds, kv_len, fewest = _bounds(names[1], kv_indptr)
        if q_bounds is not None and len(q_bounds) != len(kv_bounds):
            raise ArgumentError(
                f"{names[0]} and {names[1]} must both have batch_size + 1 elements, "
                f"got {len(q_bounds)} and {len(kv_bounds)}"
            )
        last = None
        if page_size is not None:
            last = integers(names[3], last_page_len)
            kv_len = _keys_in_pages(names[3], kv_len, fewest, last, page_size)
            _check_indices(names, indices, kv_bounds.item(0), kv_bounds.item(-1))
        lengths = BatchLengths(q_bounds, kv_bounds, kv_len, None, None, q_len, last, indices, qo_len)
        if lengths.longest_kv > MAX_KV_LEN:
            i = int(kv_len.argmax())
            raise ArgumentError(f"a request must have at most {MAX_KV_LEN} keys, request {i} has {kv_len[i]}")
        return lengths

    def on_host_in_tokens(self, kv_len_arr: Any) -> BatchLengths:
        """Return `on_host` of requests that have so many of their pages' tokens, in place of `last_page_len`."""
        given = checks.readable(self.names[3], kv_len_arr).cpu()
        full = torch.full_like(given, self.page_size or 0)
        most = self._replace(last_page_len=full).on_host()
        kv_len = given.numpy().astype(np.int64)
        checks.each_within(self.names[3], kv_len, most.kv_len, ", the tokens of a request's pages")
        return BatchLengths(most.qo_indptr, most.kv_indptr, kv_len, kv_indices=most.kv_indices)

    def on_device(self, device: torch.device) -> DeviceLengths:
        """Check what needs no values; arrays on the CPU are copied to the device."""
        names, qo_indptr, kv_indptr, indices, last_page_len, page_size, q_len = self
        if q_len is None:
            _check_bounds(names[0], qo_indptr)
        _check_bounds(names[1], kv_indptr)
        if q_len is None:
            check_size(names[1], kv_indptr, len(qo_indptr), f"as many elements as {names[0]}")
        batch_size, last, most = len(kv_indptr) - 1, None, 0
        if page_size is not None:
            check_array(names[3], last_page_len)
            check_size(names[3], last_page_len, batch_size)
            check_array(names[2], indices)
            last, most = _int32(last_page_len, device), min(len(indices), MAX_INDEX)
        queries = _int32(qo_indptr, device) if q_len is None else None
        rows = None if q_len is None else batch_size * q_len
        return DeviceLengths(queries, _int32(kv_indptr, device), last, most, q_len, indices, rows, read=self._read)

    def _read(self, now: DeviceLengths) -> BatchLengths:
        return self._replace(**now.arrays()).on_host()


# ---- checks


def check_array(name: str, value: Any) -> None:
    """Check what an index array is, but not its numbers."""
    usual = type(value) is torch.Tensor and value.layout is STRIDED and value.dtype in DTYPES and value.dim() == 1
    if not usual or value.is_neg() or not (value.is_cuda or value.is_cpu):
        checks.operand(name, value, DTYPES, (None,), "[n]")


def _check_indices(names: Sequence[str], indices: Any, first: int, end: int) -> None:
    """Check the page numbers, of which plans read those from `first` to `end`."""
    check_array(names[2], indices)
    if indices.numel() < end:
        raise ArgumentError(f"{names[2]} must have the {end} entries that {names[1]} counts, got {indices.numel()}")
    if indices.dtype == torch.int64 and indices.is_cpu:
        pages = indices[first:end]
        if (i := checks.first((pages < -1) | (pages > caches.MAX_PAGE))) is not None:  # they must fit int32
            raise ArgumentError(
                f"{names[2]}[{first + i}] must be a page within 0..{caches.MAX_PAGE}, or -1 where no query sees it, "
                f"got {int(pages[i])}"
            )


def _check_bounds(name: str, value: Any) -> None:
    check_array(name, value)
    if len(value) == 0:
        raise ArgumentError(f"{name} must have shape [batch_size + 1], got no element")


def check_size(name: str, value: Any, size: int, what: str = "shape [batch_size]") -> None:
    """Check the number of elements."""
    if len(value) != size:
        raise ArgumentError(f"{name} must have {what} = ({size},), got {len(value)} elements")


# ---- numbers


def integers(name: str, value: Any) -> np.ndarray:
    """Check an index array and return a copy of it as int64 on the host."""
    try:
        given = value.numpy()  # refuses what `check_array` refuses, and tensors on GPUs
        if value.dtype in DTYPES and value.dim() == 1:
            copied: np.ndarray = given.astype(np.int64)
            return copied
    except (AttributeError, TypeError, RuntimeError):
        pass
    check_array(name, value)
    host: np.ndarray = value.detach().cpu().numpy().astype(np.int64)
    return host


def indptr(name: str, value: Any) -> np.ndarray:
    """Check an index array [batch_size + 1] and return it as int64 on the host."""
    return _bounds(name, value)[0]


def _bounds(name: str, value: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Return `indptr`, its steps, and the smallest of them (0 where there is none)."""
    bounds = integers(name, value)
    if len(bounds) == 0:
        _check_bounds(name, value)
    steps = bounds[1:] - bounds[:-1]
    least = smallest(steps) if len(steps) else 0
    if least < 0 or bounds.item(0) < 0 or bounds.item(-1) > MAX_INDEX:
        checks.increasing(name, bounds, MAX_INDEX)
    return bounds, steps, least


def _keys_in_pages(name: str, counts: np.ndarray, fewest: int, last: np.ndarray, page_size: int) -> np.ndarray:
    """Check the tokens in each request's last page, and return the keys of requests with so many pages."""
    check_size(name, last, len(counts))
    size = np.array(page_size)  # as an operand in half the time of an integer
    kv_len = counts * size
    kv_len += last
    kv_len -= size
    # The common case costs three array operations.
    if len(last) and not (smallest(last) >= 1 and largest(last) <= page_size and fewest >= 1):
        if (i := checks.first((counts > 0) & ((last < 1) | (last > page_size)))) is not None:
            raise ArgumentError(f"{name} must be within 1..{page_size}, the page size; request {i} has {last[i]}")
        kv_len = np.where(counts > 0, kv_len, 0)
    return kv_len


def _int32(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an index array as the planner reads it; numbers beyond int32 become the largest one."""
    return there(value.clamp(0, MAX_INDEX).int() if value.dtype == torch.int64 else value, device)


def there(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an array as launches on a device read it."""
    return x.to(device, non_blocking=not copied_at_once(x, device)).contiguous()


def copied_at_once(x: torch.Tensor, device: torch.device) -> bool:
    """Tell whether a copy must end before `plan` returns: of pinned memory, which callers reuse, or for the host."""
    return x.is_cuda if device.type == "cpu" else x.is_cpu and x.is_pinned()


# ---- arrays of lengths


def int32(numbers: np.ndarray) -> torch.Tensor:
    """Return numbers as plans and buffers of CUDA graphs take them, in memory of their own."""
    return torch.from_numpy(numbers.astype(np.int32))


def bounds(counts: np.ndarray) -> np.ndarray:
    """Return where the elements of each request begin, and where the last ones end: `[len(counts) + 1]`."""
    return np.concatenate(([0], np.cumsum(counts)))


def last_page_len(kv_len: np.ndarray, num_pages: np.ndarray, page_size: int) -> np.ndarray:
    """Return the tokens in the last page of each request; 0 of a request without keys."""
    return kv_len - np.maximum(num_pages - 1, 0) * page_size
