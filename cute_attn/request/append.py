"""Requests to write rows to paged caches: what to write, where, how it is stored, and the writing by torch operations,
none of which waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError
from cute_attn.request import checks, nvfp4
from cute_attn.request.caches import BITS_DTYPES, cache_views

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
Tensors = tuple[torch.Tensor, ...]
Named = dict[str, torch.Tensor]
Scale = float | torch.Tensor  # an fp32 number, or one in a 0-d tensor on the caches' device

NO_SCALES = (1.0, 1.0)


# ---- slots


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

    def checked(self, rows: Named, cache: torch.Tensor) -> Named:
        """Return the rows that go to a cache [num_pages, page_size, ...], all of these, after checks of shapes, dtypes
        and devices, on the CPU also of values.
        """
        device, page_size, nnz = cache.device, cache.shape[1], len(next(iter(rows.values())))
        integers("batch_indices", self.batch_indices, nnz, device)
        integers("positions", self.positions, nnz, device)
        integers("kv_indices", self.kv_indices, None, device)
        requests = index_bounds("kv_indptr", self.kv_indptr, device).numel() - 1
        integers("kv_last_page_len", self.kv_last_page_len, requests, device)
        if device.type == "cpu":
            self._check_values(cache.shape[0], page_size)
        return rows

    def of_rows(self, nnz: int, cache: torch.Tensor) -> torch.Tensor:
        """Return the slot `page * page_size + offset` of each of `nnz` rows; -1 for none."""
        keep, page_size = self.batch_indices >= 0, cache.shape[1]
        if not self.kv_indices.numel() or self.kv_indptr.numel() == 1:
            return torch.full_like(self.batch_indices, -1, dtype=torch.int64)
        request, position = (torch.where(keep, x.long(), 0) for x in (self.batch_indices, self.positions))
        entry = torch.where(keep, self.kv_indptr.long()[request] + position // page_size, 0)
        return torch.where(keep, self.kv_indices.long()[entry] * page_size + position % page_size, -1)

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


class SlotMapping(NamedTuple):
    """Slots `page * page_size + offset`, one per row; those outside the cache go nowhere."""

    slot_mapping: torch.Tensor

    def checked(self, rows: Named, cache: torch.Tensor) -> Named:
        """Return the rows that go to a cache: as many as there are slots."""
        nnz = integers("slot_mapping", self.slot_mapping, None, cache.device).numel()
        for name, x in rows.items():
            if len(x) < nnz:
                raise checks.wrong(f"{name} must have a row for each of {nnz} slots", x)
        return {name: x[:nnz] for name, x in rows.items()}

    def of_rows(self, nnz: int, cache: torch.Tensor) -> torch.Tensor:
        """Return the slot of each of `nnz` rows."""
        return self.slot_mapping.long()


class OwnRows(NamedTuple):
    """Row t goes to page t of an output with pages of one token."""

    def of_rows(self, nnz: int, cache: torch.Tensor) -> torch.Tensor:
        """Return the slot of each of `nnz` rows."""
        return torch.arange(nnz, device=cache.device)


Slots = PageTable | SlotMapping | OwnRows


def destinations(slots: Slots, nnz: int, cache: torch.Tensor) -> Destinations:
    """Return where `nnz` rows, at least one, go in a cache [num_pages, page_size, ...] that has a page."""
    num_pages, page_size = cache.shape[:2]
    slot = slots.of_rows(nnz, cache)
    keep = (slot >= 0) & (slot < num_pages * page_size)
    source = torch.where(keep, torch.arange(nnz, device=slot.device), keep.to(torch.uint8).argmax())
    any_row = keep.any()
    slot = torch.where(any_row, slot[source], 0)
    return Destinations(source, slot // page_size, slot % page_size, any_row)


def write_rows(cache: torch.Tensor, rows: torch.Tensor, destinations: Destinations) -> None:
    """Write rows [nnz, num_kv_heads, n] to a view [num_pages, page_size, num_kv_heads, n] of a cache."""
    bits = BITS_DTYPES[cache.element_size()]
    cache, rows = cache.view(bits), rows.view(bits)
    first = cache[:1, :1].flatten(0, 1)
    values = torch.where(destinations.any_row, rows[destinations.source], first)
    cache.index_put_((destinations.page, destinations.slot), values)


# ---- rows


class Append(NamedTuple):
    """Rows of keys and of values (or of one of them), and the caches that they are written to.

    All tensors are checked, and on one device.
    """

    rows: Tensors  # [nnz, num_heads, n]
    caches: Tensors  # [num_pages, page_size, num_heads, n], n / 2 for NVFP4
    slots: Slots
    stored: str = "copy"  # or "nvfp4", "float8_e4m3fn", "float8_e5m2"
    block_scales: Tensors = ()  # of NVFP4: uint8 [num_pages, page_size, num_heads, n / 16]
    scales: tuple[Scale, ...] = NO_SCALES


def reference(append: Append) -> None:
    """Writes the rows by torch operations, on any device. CUDA graphs can capture them."""
    nnz, cache = append.rows[0].shape[0], append.caches[0]
    if not nnz or not cache.shape[0]:
        return
    found = destinations(append.slots, nnz, cache)
    for i, (rows, cache) in enumerate(zip(append.rows, append.caches, strict=True)):
        if append.stored == "copy":
            write_rows(cache, rows, found)
        elif append.stored == "nvfp4":
            data, block_scales = nvfp4.quantize(rows, _wide(append.scales[i]))
            write_rows(cache, data, found)
            write_rows(append.block_scales[i], block_scales, found)
        else:
            write_rows(cache, nvfp4.quantize_fp8(rows, _wide(append.scales[i]), cache.dtype), found)


def _wide(scale: Scale) -> Scale:
    return scale.double() if isinstance(scale, torch.Tensor) else scale


# ---- checks


def writable_views(name: str, cache: Any, kv_layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `cache_views` of a cache to be written; slots that share memory are refused."""
    views = cache_views(name, cache, kv_layout)
    for x, view in zip("kv", views, strict=True):
        checks.dense(f"{x} of {name}", view)
        checks.check_grad(f"{x} of {name}", view)
    return views


def check_rows(
    rows: dict[str, Any], caches: tuple[torch.Tensor, torch.Tensor], packing: int = 1, dtypes: Any = None
) -> None:
    """Check rows [nnz, num_kv_heads, head_dim] of keys and of values to be written to `caches`, which hold `packing`
    numbers per element. `dtypes`: of the rows; None: those of the caches.
    """
    for (name, x), cache in zip(rows.items(), caches, strict=True):
        expected = None, cache.shape[2], packing * cache.shape[3]
        axes, where = "[nnz, num_kv_heads, head_dim]", "paged_kv_cache's device"
        checks.operand(name, x, dtypes or (cache.dtype,), expected, axes, cache.device, where)
    check_same_rows(rows)


def latent_rows(rows: Named, caches: dict[str, Any]) -> tuple[Named, Named]:
    """Check rows [nnz, n] of both parts of latent keys to be written to caches [num_pages, page_size, n]. Return rows
    and caches with an axis of one head.
    """
    for (name, x), (cache_name, cache) in zip(rows.items(), caches.items(), strict=True):
        cache = checks.tensor(cache_name, cache)
        if cache.dim() != 3 or cache.shape[1] == 0:
            raise checks.wrong(f"{cache_name} must have shape [num_pages, page_size, n]", cache)
        checks.dense(cache_name, cache)
        checks.check_grad(cache_name, cache)
        axes, where = f"[nnz, {cache.shape[2]}]", f"{cache_name}'s device"
        checks.operand(name, x, (cache.dtype,), (None, cache.shape[2]), axes, cache.device, where)
    ckv, kpe = caches.values()
    if ckv.shape[:2] != kpe.shape[:2] or ckv.device != kpe.device:
        raise ArgumentError(
            "ckv_cache and kpe_cache must have the same pages and page size, on one device, "
            f"got {checks.describe(ckv)} and {checks.describe(kpe)}"
        )
    check_same_rows(rows)
    return {name: x[:, None] for name, x in rows.items()}, {name: x[:, :, None] for name, x in caches.items()}


def check_same_rows(rows: dict[str, Any]) -> None:
    """Check that there are as many rows of one as of the other."""
    (first, x), (name, y) = rows.items()
    if y.shape[0] != x.shape[0]:
        raise checks.wrong(f"{name} must have as many rows as {first}, {x.shape[0]}", y)


def integers(name: str, value: Any, size: int | None = None, device: torch.device | None = None) -> torch.Tensor:
    """Check 1-D integers, `size` of them, on `device`."""
    on = checks.tensor(name, value).device if device is None else device
    return checks.operand(name, value, INTEGERS, (size,), "[n]", on, "device")


def index_bounds(name: str, value: Any, device: torch.device | None = None) -> torch.Tensor:
    """Check integers [batch_size + 1] on `device`, on the CPU also that they do not decrease."""
    indptr = integers(name, value, None, device)
    if not indptr.numel():
        raise ArgumentError(f"{name} must have batch_size + 1 elements, got none")
    if indptr.is_cpu and not torch.compiler.is_compiling() and (indptr[1:] < indptr[:-1]).any():
        raise ArgumentError(f"{name} must not decrease, got {checks.shown(indptr.tolist())}")
    return indptr


def _check_range(name: str, rows: torch.Tensor, values: torch.Tensor, stop: Any, what: str) -> None:
    """Check 0 <= values < stop, element by element; for CPU tensors."""
    if (i := checks.first((values < 0) | (values >= stop))) is not None:
        bound = int(stop[i]) if isinstance(stop, torch.Tensor) else stop
        raise ArgumentError(f"{name} must stay within the {bound} {what}, got {int(values[i])} for row {int(rows[i])}")
