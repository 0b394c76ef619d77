"""Paged caches: `append_paged_kv_cache`, `get_batch_indices_positions`, `get_seq_lens`.

All are torch operations that do not synchronise the device, so that CUDA graphs can capture them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError
from cute_attn.request import checks
from cute_attn.request.caches import BITS_DTYPES, cache_views


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write rows of keys and values to their slots in a paged cache.

    Row t becomes token `positions[t]` of request `b = batch_indices[t]`, in slot `positions[t] % page_size` of page
    `kv_indices[kv_indptr[b] + positions[t] // page_size]`. Rows with a negative batch index are not written.

    Parameters
    ----------
    append_key, append_value : `[nnz, num_kv_heads, head_dim]`, any strides, in the caches' dtypes. Their head
        dimensions may differ.
    batch_indices, positions : integers `[nnz]`, as `get_batch_indices_positions` gives them.
    paged_kv_cache : (k_cache, v_cache), each `[num_pages, page_size, num_kv_heads, head_dim]` (NHD) or
        `[num_pages, num_kv_heads, page_size, head_dim]` (HND), or both in one 5-D tensor `[num_pages, 2, ...]`. Any
        page size; with pages of one token their axis may be missing. Any strides with unit stride on the last axis.
        Written.
    kv_indices : integers, page numbers of all requests.
    kv_indptr : integers `[batch_size + 1]`, where each request's page numbers start. It counts the pages of the
        appended tokens too.
    kv_last_page_len : integers `[batch_size]`. Only its shape is checked: positions decide.
    kv_layout : "NHD" or "HND".

    Raises
    ------
    ArgumentTypeError (not a tensor), LayoutError (kv_layout), ArgumentError (shape, dtype, device; on the CPU also rows
    that have no page). On a CUDA device the values of index tensors are not checked.
    """
    k_cache, v_cache = cache_views("paged_kv_cache", paged_kv_cache, kv_layout)
    for name, rows, cache in (("append_key", append_key, k_cache), ("append_value", append_value, v_cache)):
        check_rows(name, rows, cache, cache.shape[3], "paged_kv_cache")
        checks.dtype(name, rows.dtype, (cache.dtype,))
    check_same_rows(append_key, append_value)
    table = PageTable(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    destinations = table.destinations(append_key.shape[0], k_cache)
    write_rows(k_cache, append_key, destinations)
    write_rows(v_cache, append_value, destinations)


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the request and the position of every appended token.

    Request i's tokens are rows `append_indptr[i]:append_indptr[i + 1]` and the last ones of its sequence: row t has
    position `seq_lens[i] - (append_indptr[i + 1] - t)`. Rows outside `append_indptr[0]:append_indptr[-1]` get request
    -1 and position 0; `append_paged_kv_cache` does not write them.

    Parameters
    ----------
    append_indptr : integers `[batch_size + 1]`, not decreasing.
    seq_lens : integers `[batch_size]` on the same device: tokens of each request after the append.
    nnz : number of rows, padding included.
    batch_indices, positions : int32 `[nnz]` buffers for the result; new ones by default.

    Returns
    -------
    (batch_indices, positions) : int32 `[nnz]`.

    Raises
    ------
    ArgumentTypeError (not a tensor; nnz not an int), ArgumentError (shape, dtype, device, nnz < 0).
    """
    nnz = checks.integer("nnz", nnz)
    if nnz < 0:
        raise ArgumentError(f"nnz must be >= 0, got {nnz}")
    indptr = _indptr("append_indptr", append_indptr, None)
    batch_size = indptr.numel() - 1
    lens = _integers("seq_lens", seq_lens, batch_size, indptr.device)
    buffers = []
    for name, buffer in (("batch_indices", batch_indices), ("positions", positions)):
        if buffer is not None:
            _integers(name, buffer, nnz, indptr.device)
            checks.dtype(name, buffer.dtype, (torch.int32,))
        else:
            buffer = torch.empty(nnz, dtype=torch.int32, device=indptr.device)
        buffers.append(buffer)
    row = torch.arange(nnz, device=indptr.device)
    if batch_size == 0:
        buffers[0].fill_(-1), buffers[1].zero_()
        return buffers[0], buffers[1]
    request = torch.searchsorted(indptr[1:].contiguous(), row, right=True)
    appended = (row >= indptr[0]) & (request < batch_size)
    request = request.clamp(max=batch_size - 1)
    buffers[0].copy_(torch.where(appended, request, -1))
    buffers[1].copy_(torch.where(appended, lens[request] - (indptr[request + 1] - row), 0))
    return buffers[0], buffers[1]


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Compute the tokens of each request of a paged cache: `max(pages - 1, 0) * page_size + kv_last_page_len`.

    A request without pages has `kv_last_page_len` tokens by this formula, which is FlashInfer's; attention counts 0.

    Parameters
    ----------
    kv_indptr : integers `[batch_size + 1]`.
    kv_last_page_len : integers `[batch_size]` on the same device.
    page_size : tokens per page, at least 1.

    Returns
    -------
    `[batch_size]` in the wider of the two dtypes.

    Raises
    ------
    ArgumentTypeError (not a tensor; page_size not an int), ArgumentError (shape, dtype, device, page_size < 1).
    """
    page_size = checks.integer("page_size", page_size)
    if page_size < 1:
        raise ArgumentError(f"page_size must be >= 1, got {page_size}")
    indptr = _indptr("kv_indptr", kv_indptr, None)
    _integers("kv_last_page_len", kv_last_page_len, indptr.numel() - 1, indptr.device)
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


# --- where rows go ---------------------------------------------------------------------------------------------------


class Destinations(NamedTuple):
    """Where rows are written. A row that is not to be written repeats another: same slot, same value."""

    source: torch.Tensor  # [nnz] the row written
    page: torch.Tensor  # [nnz]
    slot: torch.Tensor  # [nnz]
    any_row: torch.Tensor  # bool: at least one row is written. Otherwise slot 0 of page 0 gets its own value.


class PageTable(NamedTuple):
    """The arguments that say where in a paged cache rows go, as the user gave them."""

    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor

    def destinations(self, nnz: int, cache: torch.Tensor) -> Destinations | None:
        """Check and return where `nnz` rows go in a cache [num_pages, page_size, ...]; None: nothing to write."""
        device, page_size = cache.device, cache.shape[1]
        request = _integers("batch_indices", self.batch_indices, nnz, device)
        position = _integers("positions", self.positions, nnz, device)
        pages = _integers("kv_indices", self.kv_indices, None, device)
        indptr = _indptr("kv_indptr", self.kv_indptr, device)
        _integers("kv_last_page_len", self.kv_last_page_len, indptr.numel() - 1, device)
        if device.type == "cpu":
            self._check_values(cache.shape[0], page_size)
        if not nnz or not pages.numel() or not cache.shape[0] or indptr.numel() == 1:
            return None
        source, keep = _kept(request >= 0)
        request, position = request[source].clamp(min=0), position[source]
        entry = torch.where(keep, indptr[request] + position // page_size, 0)
        page = torch.where(keep, pages[entry], 0)
        return Destinations(source, page, torch.where(keep, position % page_size, 0), keep.any())

    def _check_values(self, num_pages: int, page_size: int) -> None:
        """Check that every row to be written has a page. Reads values: for CPU tensors only."""
        rows = (self.batch_indices >= 0).nonzero().flatten()
        request, position = self.batch_indices[rows].long(), self.positions[rows].long()
        batch_size = self.kv_indptr.numel() - 1
        _check_range("batch_indices", rows, request, batch_size, "requests")
        indptr = self.kv_indptr.long()
        room = (indptr[request + 1] - indptr[request]) * page_size
        _check_range("positions", rows, position, room, "tokens that the request's pages hold")
        entry = indptr[request] + position // page_size
        _check_range("kv_indptr", rows, entry, self.kv_indices.numel(), "kv_indices")
        _check_range("kv_indices", rows, self.kv_indices[entry].long(), num_pages, "pages of the cache")


def slot_destinations(slot_mapping: torch.Tensor, cache: torch.Tensor) -> Destinations | None:
    """Return the destinations of rows with slots `page * page_size + offset`; negative slots are not written."""
    slots = _integers("slot_mapping", slot_mapping, None, cache.device)
    num_pages, page_size = cache.shape[:2]
    if cache.device.type == "cpu":
        rows = (slots >= 0).nonzero().flatten()
        _check_range("slot_mapping", rows, slots[rows], num_pages * page_size, "slots of the cache")
    if not slots.numel() or not num_pages:
        return None
    source, keep = _kept(slots >= 0)
    slots = slots[source].clamp(min=0)
    return Destinations(source, slots // page_size, slots % page_size, keep.any())


def _kept(keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row to write for each row (itself if kept, else the first that is), and whether that one is kept."""
    first = keep.to(torch.uint8).argmax()
    source = torch.where(keep, torch.arange(keep.numel(), device=keep.device), first)
    return source, keep[source]


def write_rows(cache: torch.Tensor, rows: torch.Tensor, destinations: Destinations | None) -> None:
    """Write rows [nnz, num_kv_heads, n] to a view [num_pages, page_size, num_kv_heads, n] of a cache."""
    if destinations is None:
        return
    bits = BITS_DTYPES[cache.element_size()]
    cache, rows = cache.view(bits), rows.view(bits)
    first = cache[:1, :1].flatten(0, 1)
    values = torch.where(destinations.any_row, rows[destinations.source], first)
    cache.index_put_((destinations.page, destinations.slot), values)


# --- checks ----------------------------------------------------------------------------------------------------------


def check_rows(name: str, rows: Any, cache: torch.Tensor, head_dim: int, cache_name: str) -> None:
    """Check rows [nnz, num_kv_heads, head_dim] to be written to `cache`."""
    rows = checks.tensor(name, rows)
    expected = cache.shape[2], head_dim
    if rows.dim() != 3 or rows.shape[1:] != expected:
        raise ArgumentError(
            f"{name} must have shape [nnz, num_kv_heads, head_dim] = [nnz, {expected[0]}, {expected[1]}], "
            f"got {checks.describe(rows)}"
        )
    if rows.device != cache.device:
        raise ArgumentError(f"{name} must be on {cache_name}'s device {cache.device}, got {checks.describe(rows)}")


def check_same_rows(append_key: torch.Tensor, append_value: torch.Tensor) -> None:
    """Check that there are as many rows of values as of keys."""
    if append_value.shape[0] != append_key.shape[0]:
        raise ArgumentError(
            f"append_value must have as many rows as append_key, {append_key.shape[0]}, "
            f"got {checks.describe(append_value)}"
        )


def _integers(name: str, value: Any, size: int | None, device: torch.device | None) -> torch.Tensor:
    """Check 1-D integers, `size` of them, on `device`, and return them as int64."""
    value = checks.tensor(name, value)
    if value.dim() != 1 or (size is not None and value.numel() != size):
        raise ArgumentError(f"{name} must have shape [{'n' if size is None else size}], got {checks.describe(value)}")
    if value.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise ArgumentError(f"{name} must be of an integer dtype, got {checks.describe(value)}")
    if device is not None and value.device != device:
        raise ArgumentError(f"{name} must be on device {device}, got {checks.describe(value)}")
    return value.long()


def _indptr(name: str, value: Any, device: torch.device | None) -> torch.Tensor:
    """Check integers [batch_size + 1] on `device` and return them as int64."""
    indptr = _integers(name, value, None, device)
    if not indptr.numel():
        raise ArgumentError(f"{name} must have batch_size + 1 elements, got none")
    return indptr


def _check_range(name: str, rows: torch.Tensor, values: torch.Tensor, stop: Any, what: str) -> None:
    """Check 0 <= values < stop, element by element; for CPU tensors."""
    wrong = (values < 0) | (values >= stop)
    if not wrong.any():
        return
    i = int(wrong.to(torch.uint8).argmax())
    bound = int(stop[i]) if isinstance(stop, torch.Tensor) else stop
    raise ArgumentError(f"{name} must stay within the {bound} {what}, got {int(values[i])} for row {int(rows[i])}")
