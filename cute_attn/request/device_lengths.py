"""Index arrays on the device, of which `plan` checks what it can without reading them: types, shapes and places.

What else `batch_plan` checks needs their values. With CUTE_ATTN_VALIDATE=1 plans read them (`wrappers.plan_request`);
without it the planner kernel keeps within the memory of q, the index arrays and the plan, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import DeviceLengths, DeviceTokens, Tokens
from cute_attn.request import batch_plan, checks
from cute_attn.request.batch_plan import INDEX_DTYPES, Pages
from cute_attn.request.settings import MAX_INDEX


def ragged(device: torch.device, qo_indptr: Any, kv_indptr: Any) -> DeviceTokens:
    """Check the index arrays of a ragged batch; those on the CPU are copied to the device."""
    _index_array("qo_indptr", qo_indptr, 1)
    _index_array("kv_indptr", kv_indptr, 1)
    _check_batch("kv_indptr", kv_indptr, len(qo_indptr), "as many elements as qo_indptr")
    lengths = DeviceLengths(_int32(qo_indptr, device), _int32(kv_indptr, device), None, 0)
    return DeviceTokens(lengths, None, None, None, lambda now: batch_plan.ragged(now.qo_indptr, now.kv_indptr))


def paged(
    device: torch.device, queries: tuple[Any, int], pages: Pages, page_size: int, names: Sequence[str]
) -> DeviceTokens:
    """Check the index arrays of a paged batch; those on the CPU are copied to the device. `queries`: `qo_indptr`, or
    None and the query tokens of every request. `names`: the caller's names of it and of the arrays of `pages`.
    """
    qo_indptr, q_len = queries
    _index_array(names[1], pages.indptr, 1)
    if qo_indptr is not None:
        _index_array(names[0], qo_indptr, 1)
        _check_batch(names[1], pages.indptr, len(qo_indptr), f"as many elements as {names[0]}")
    _index_array(names[3], pages.last_page_len, 0)
    batch_size = len(pages.indptr) - 1
    _check_batch(names[3], pages.last_page_len, batch_size, "shape [batch_size]")
    _index_array(names[2], pages.indices, 0)
    numbers = DeviceLengths(
        None if qo_indptr is None else _int32(qo_indptr, device),
        _int32(pages.indptr, device),
        _int32(pages.last_page_len, device),
        min(len(pages.indices), MAX_INDEX),
        q_len,
    )

    def read(now: DeviceLengths) -> Tokens:
        if now.qo_indptr is None:
            bounds = batch_plan.uniform_queries(batch_size, q_len)
        else:
            bounds = batch_plan.indptr(names[0], now.qo_indptr)
        read_pages = Pages(now.kv_indptr, pages.indices, now.last_page_len)
        return batch_plan.paged(bounds, read_pages, page_size, names)

    rows = None if qo_indptr is not None else batch_size * q_len
    return DeviceTokens(numbers, pages.indices, q_len or None, rows, read)


def _index_array(name: str, value: Any, least: int) -> None:
    checks.tensor(name, value)
    checks.dtype(name, value.dtype, INDEX_DTYPES)
    if value.dim() != 1:
        raise ArgumentError(f"{name} must have 1 dimension, got {checks.describe(value)}")
    if len(value) < least:
        raise ArgumentError(f"{name} must have shape [batch_size + 1], got no element")


def _check_batch(name: str, value: torch.Tensor, size: int, what: str) -> None:
    if len(value) != size:
        raise ArgumentError(f"{name} must have {what} = ({size},), got {len(value)} elements")


def _int32(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an index array as the planner reads it; numbers beyond int32 become the largest one."""
    if value.dtype == torch.int64:
        value = value.clamp(0, MAX_INDEX).int()
    if value.is_cpu:  # from pinned memory the copy must end before `plan` returns: the caller may then overwrite it
        value = value.to(device, non_blocking=not value.is_pinned())
    return value.contiguous()
