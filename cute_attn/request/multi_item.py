"""Check the arguments of multi-item scoring and turn them into bounds of the hidden keys of every query token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import BatchLengths, Lengths
from cute_attn.request import checks, index_arrays
from cute_attn.request.batch_plan import Mask

DTYPES = (torch.uint16, torch.uint32, torch.int32, torch.int64)


def bound_keys(given: tuple[Any, Any, Any, Any], lengths: Lengths, mask: Mask) -> Lengths:
    """Return `lengths` with key bounds; unchanged without `prefix_len_ptr`. `given`: this, token_pos_in_items_ptr,
    token_pos_in_items_len and max_item_len_ptr.
    """
    prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr = given
    stride = checks.at_least("token_pos_in_items_len", token_pos_in_items_len, 0)
    if prefix_len_ptr is None:
        if token_pos_in_items_ptr is max_item_len_ptr is None and not stride:
            return lengths
        of_items = {"token_pos_in_items_ptr": token_pos_in_items_ptr, "max_item_len_ptr": max_item_len_ptr}
        for name, value in (*of_items.items(), ("token_pos_in_items_len", stride)):
            if value is not None:
                raise ArgumentError(f"{name} must come with prefix_len_ptr, got {checks.shown(value)} alone")
    if mask.packed is not None:
        raise ArgumentError("a custom mask and prefix_len_ptr contradict: give one of them")
    assert isinstance(lengths, BatchLengths)  # with `prefix_len_ptr` plans read the lengths
    if token_pos_in_items_ptr is None:
        raise ArgumentError("token_pos_in_items_ptr must come with prefix_len_ptr, got None")
    prefix_len = _per_request("prefix_len_ptr", prefix_len_ptr, lengths.batch_size)
    positions = _integers("token_pos_in_items_ptr", token_pos_in_items_ptr)
    # Query tokens behind the prefix of their request: their rows of q, and positions among its keys and in their item.
    request = np.arange(lengths.batch_size).repeat(lengths.qo_len)
    row = np.arange(lengths.first_row, lengths.rows)
    position = row + (lengths.kv_len - lengths.qo_indptr[1:])[request]
    behind = position >= prefix_len[request]
    row, request, position = row[behind], request[behind], position[behind]
    _check_room(lengths.kv_len - prefix_len, request, stride, len(positions))
    in_item = positions[request * stride + position - prefix_len[request]]
    if (i := checks.first((np.diff(in_item) > 1) & (np.diff(request) == 0))) is not None:
        raise ArgumentError(
            "token_pos_in_items_ptr must not grow by more than 1 from token to token, got "
            f"{in_item[i + 1]} after {in_item[i]} (request {request[i]}, key {position[i + 1]})"
        )
    if max_item_len_ptr is not None:
        most = _per_request("max_item_len_ptr", max_item_len_ptr, lengths.batch_size)[request]
        if (i := checks.first(in_item > most)) is not None:
            raise ArgumentError(
                f"max_item_len_ptr must be at least the positions in items; request {request[i]} has "
                f"{most[i]} and a token at {in_item[i]}"
            )
    ends = np.minimum(prefix_len, lengths.kv_len)  # fits 32 bits
    bounds = np.zeros((lengths.rows, 2), np.int32)
    bounds[lengths.first_row :] = ends.repeat(lengths.qo_len)[:, None]  # nothing is hidden from tokens of the prefix
    bounds[row, 1] = np.maximum(position - in_item + 1, ends[request])
    return lengths.replace(key_bounds=bounds)


def _check_room(needed: np.ndarray, request: np.ndarray, stride: int, size: int) -> None:
    """Check that the positions of every request that has query tokens in items are there."""
    for i in np.unique(request):
        if needed[i] > stride and len(needed) > 1:
            raise ArgumentError(
                f"token_pos_in_items_len must be at least kv_len - prefix_len; request {i} needs {needed[i]}, "
                f"got {stride}"
            )
        if i * stride + needed[i] > size:
            raise ArgumentError(
                f"token_pos_in_items_ptr must have the {i * stride + needed[i]} elements up to the last key of "
                f"request {i}, got {size}"
            )


def _per_request(name: str, value: Any, batch_size: int) -> np.ndarray:
    numbers = _integers(name, value)
    index_arrays.check_size(name, numbers, batch_size)
    return numbers


def _integers(name: str, value: Any) -> np.ndarray:
    """Return a tensor of integers that are not negative as 1-D int64 on the host. No dimension: one element."""
    value = checks.readable(name, value)
    checks.dtype(name, value.dtype, DTYPES)
    if value.dim() > 1:
        raise ArgumentError(f"{name} must have 1 dimension, or none for one element; got {checks.describe(value)}")
    numbers: np.ndarray = value.cpu().numpy().astype(np.int64).reshape(-1)
    if numbers.min(initial=0) < 0:
        raise ArgumentError(f"{name} must not be negative, got {numbers.min()}")
    return numbers
