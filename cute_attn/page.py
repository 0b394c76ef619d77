"""Paged caches: appending to them, in their dtype or quantised to NVFP4, and the lengths of requests.

On a CUDA device an append is one kernel launch. Nothing here synchronises the device: CUDA graphs can capture it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.dispatch import append
from cute_attn.ops import declare, trace
from cute_attn.request import append as appending
from cute_attn.request import batch_plan, checks, nvfp4
from cute_attn.request.append import NO_SCALES, Append
from cute_attn.request.nvfp4 import Pair
from cute_attn.request.settings import MAX_INDEX
from cute_attn.runtime import switches
from cute_attn.runtime.staging import is_capturing
from cute_attn.wrappers import calls

LATENT: Any = object()  # in place of the layout of caches

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]


@declare.operator("append", mutates=("paged_kv_cache",))
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
        page size; with pages of one token their axis may be missing. Any strides with unit stride on the last axis, but
        no two slots in the same memory. Written.
    kv_indices : integers, page numbers of all requests.
    kv_indptr : integers `[batch_size + 1]`, where each request's page numbers start. It counts the pages of the
        appended tokens too.
    kv_last_page_len : integers `[batch_size]`. Only its shape is checked: positions decide.
    kv_layout : "NHD" or "HND".

    Raises
    ------
    ArgumentTypeError (not a tensor), LayoutError (kv_layout), ArgumentError (shape, dtype, device, strides; on the CPU
    also rows that have no page). On a CUDA device the values of index tensors are not checked: rows that have no
    page of the cache are not written.
    """
    if is_dynamo_compiling():
        trace.operator("append")(locals())
        return
    table = appending.PageTable(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    _write({"append_key": append_key, "append_value": append_value}, paged_kv_cache, table, kv_layout)


@declare.operator("append_mla", mutates=("ckv_cache", "kpe_cache"))
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor | None,
    kpe_cache: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write latent rows and their rotated columns to their slots in a paged latent cache.

    Rows go where those of `append_paged_kv_cache` go.

    Parameters
    ----------
    append_ckv, append_kpe : `[nnz, latent_dim]` and `[nnz, rope_dim]`, any strides, in the caches' dtypes.
    ckv_cache, kpe_cache : `[num_pages, page_size, latent_dim]` and `[num_pages, page_size, rope_dim]`: tensors of their
        own, or columns of one. Unit stride on the last axis, no two slots in the same memory. Written.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len : as for `append_paged_kv_cache`.

    Raises
    ------
    The errors of `append_paged_kv_cache`.
    """
    if is_dynamo_compiling():
        trace.operator("append_mla")(locals())
        return
    table = appending.PageTable(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    _write({"append_ckv": append_ckv, "append_kpe": append_kpe}, (ckv_cache, kpe_cache), table, LATENT)


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
    ArgumentTypeError (not a tensor; nnz not an int), ArgumentError (shape, dtype, device, nnz < 0, buffers that share
    memory).
    """
    nnz = checks.at_least("nnz", nnz, 0, MAX_INDEX)
    indptr = appending.index_bounds("append_indptr", append_indptr).long()
    batch_size = indptr.numel() - 1
    lens = appending.integers("seq_lens", seq_lens, batch_size, indptr.device).long()
    written: dict[str, Any] = {"batch_indices": batch_indices, "positions": positions}
    for name, buffer in written.items():
        if buffer is None:
            written[name] = torch.empty(nnz, dtype=torch.int32, device=indptr.device)
        else:
            checks.operand(name, buffer, (torch.int32,), (nnz,), "[nnz]", indptr.device, "device")
            checks.writable(name, buffer)
    checks.apart(written.items(), (("append_indptr", append_indptr), ("seq_lens", seq_lens)))
    of_request, of_token = written.values()
    row = torch.arange(nnz, device=indptr.device)
    if batch_size == 0:
        return of_request.fill_(-1), of_token.zero_()
    request = torch.searchsorted(indptr[1:].contiguous(), row, right=True)
    appended = (row >= indptr[0]) & (request < batch_size)
    request = request.clamp(max=batch_size - 1)
    of_request.copy_(torch.where(appended, request, -1))
    of_token.copy_(torch.where(appended, lens[request] - (indptr[request + 1] - row), 0))
    return of_request, of_token


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
    `[batch_size]` int32, or int64 if one of the two is.

    Raises
    ------
    ArgumentTypeError (not a tensor; page_size not an int), ArgumentError (shape, dtype, device, page_size; on the CPU
    also bounds that decrease).
    """
    page_size = batch_plan.count("page_size", page_size)
    indptr = appending.index_bounds("kv_indptr", kv_indptr).long()
    last = appending.integers("kv_last_page_len", kv_last_page_len, indptr.numel() - 1, indptr.device).long()
    lens = (indptr.diff() - 1).clamp(min=0) * page_size + last
    return lens if torch.int64 in (kv_indptr.dtype, kv_last_page_len.dtype) else lens.int()


@declare.operator("append_nvfp4", mutates=("paged_kv_cache", "kv_cache_sf"))
def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | Pair,
    kv_cache_sf: torch.Tensor | Pair,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Quantise rows of keys and values to NVFP4 and write them to a paged cache. Can be captured by CUDA graphs.

    Parameters
    ----------
    append_key, append_value : `[nnz, num_kv_heads, head_dim]` fp16, bf16 or fp32, any strides.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, kv_layout : as for `append_paged_kv_cache`.
    paged_kv_cache : uint8 caches like those of `append_paged_kv_cache`, with head_dim / 2 on the last axis. Written.
    kv_cache_sf : e4m3, or uint8 with the bits of e4m3: the same with head_dim / 16, linear for K and V. Written.
    k_scale, v_scale : global scales, > 0, up to 1e38: numbers, or one-element fp32 tensors on the caches' device or
        on the CPU. A captured graph keeps the values of numbers and of CPU tensors.

    Raises
    ------
    The errors of `append_paged_kv_cache`; ArgumentError also for a scale that is not positive and finite: values of
    scale tensors on a CUDA device are checked only with `CUTE_ATTN_VALIDATE=1`.
    """
    if is_dynamo_compiling():
        trace.operator("append_nvfp4")(locals())
        return
    table = appending.PageTable(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    rows = {"append_key": append_key, "append_value": append_value}
    _write(rows, paged_kv_cache, table, kv_layout, kv_cache_sf, (k_scale, v_scale))


@declare.operator("append_nvfp4_slots", mutates=("paged_kv_cache", "kv_cache_sf"))
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor | Pair,
    kv_cache_sf: torch.Tensor | Pair,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Quantise rows to NVFP4 and write them to given slots of a paged cache. Can be captured by CUDA graphs.

    Parameters
    ----------
    slot_mapping : integers `[nnz]`: row t goes to offset `slot % page_size` of page `slot // page_size`; rows with
        slots outside the cache, negative or past its end, are not written.
    append_key, append_value : `[nnz, num_kv_heads, head_dim]` fp16, bf16 or fp32, any strides; rows past nnz may follow
        and are not written.
    paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout : as for `nvfp4_quantize_append_paged_kv_cache`. While a
        CUDA graph is captured, scales must be tensors on the caches' device, whose values replays read.

    Raises
    ------
    The errors of `nvfp4_quantize_append_paged_kv_cache`; ArgumentError also for another scale during capture.
    """
    if is_dynamo_compiling():
        trace.operator("append_nvfp4_slots")(locals())
        return
    device = checks.tensor("append_key", append_key).device
    if is_capturing(device):  # a graph would keep other scales as they are now, whatever the caller changes later
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if not isinstance(scale, torch.Tensor) or scale.device != device:
                raise checks.wrong(f"{name} must be a float32 tensor on {device} during CUDA graph capture", scale)
    rows, slots = {"append_key": append_key, "append_value": append_value}, appending.SlotMapping(slot_mapping)
    _write(rows, paged_kv_cache, slots, kv_layout, kv_cache_sf, (k_scale, v_scale))


def _write(
    rows: appending.Named,
    cache: Any,
    slots: appending.PageTable | appending.SlotMapping,
    kv_layout: Any,
    scale_cache: Any = None,
    scales: tuple[Any, ...] = (),
) -> None:
    """Write rows to their slots, as NVFP4 if there are scales. Only a call unlike all earlier ones is checked in full.
    `kv_layout`: LATENT for a pair of caches of latent rows and of their rotated columns.
    """
    (key, given), found = calls.NO_CALL, None
    try:
        numbers, _, optional, on_cpu = calls.operands((*(scales or NO_SCALES), None), None, None, None, None)
        (k, v, of_cache), (k_sf, v_sf, of_scales) = map(_halves, (cache, scale_cache))
        of_key, of_value = rows.values()
        given = of_key, of_value, of_value, k, v, k_sf, optional, (*slots, *on_cpu), v_sf
        alike = type(slots), kv_layout, bool(scales), of_cache, of_scales
        key, found = calls.repeated(calls.UNPLANNED, given, numbers, alike)
    except calls.NOT_TENSORS:  # which the checks refuse
        pass
    if found is not None:
        return
    if kv_layout is LATENT:
        rows, caches = appending.latent_rows(rows, dict(zip(("ckv_cache", "kpe_cache"), cache, strict=True)))
    elif scales:
        pairs = nvfp4.cache_pairs(cache, scale_cache, kv_layout, appending.writable_views)
        appending.check_rows(rows, pairs[0], 2, nvfp4.INPUTS)
        caches = dict(zip(nvfp4.CACHE_NAMES, (*pairs[0], *pairs[1]), strict=True))
    else:
        pair = appending.writable_views("paged_kv_cache", cache, kv_layout)
        appending.check_rows(rows, pair)
        caches = dict(zip(nvfp4.CACHE_NAMES, pair, strict=False))
    written = tuple(caches.values())
    rows = slots.checked(rows, written[0])
    named_scales, device = checks.named(("k_scale", "v_scale"), scales), written[0].device
    checks.apart(caches.items(), [*rows.items(), *checks.named(slots._fields, slots), *named_scales])
    read = switches.validates() and not is_capturing(device)
    factors = tuple(nvfp4.scale_of(name, scale, device, read) for name, scale in named_scales)
    stored = "nvfp4" if scales else "copy"
    fire = append.run(Append(tuple(rows.values()), written[:2], slots, stored, written[2:], factors or NO_SCALES))
    calls.enter_append(key, fire, given, written, len(slots[:4]))  # launches read no lengths of last pages


def _halves(cache: Any) -> tuple[Any, Any, Any]:
    """Return k and v of a cache that is a pair. Where one tensor has both, or pages of both take turns, return that
    tensor or k, None, and what else equal calls have in common.
    """
    if not isinstance(cache, tuple | list):
        return cache, None, None
    k, v = cache
    behind = v.data_ptr() - k.data_ptr()
    if 0 < behind < k.stride(0) * k.itemsize and not (v.is_neg() or v.requires_grad):
        return k, None, (behind, calls.layouts((v,)))
    return k, v, None
