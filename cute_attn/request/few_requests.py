"""Index arrays of few requests: read and checked as lists, which takes half the time of arrays of a few numbers.

The functions return None for what is not on the host, not plain, or wrong: `batch_plan` tells what is wrong.
"""

from __future__ import annotations

from operator import sub
from typing import Any

import torch

from cute_attn.problem import BatchLengths, Tokens
from cute_attn.request.settings import MAX_INDEX, MAX_KV_LEN

FEW = 8  # requests
INDEX_DTYPES = (torch.int32, torch.int64)
STRIDED = torch.strided


def paged(qo_indptr: Any, kv_indptr: Any, last_page_len: Any, indices: Any, page_size: int) -> Tokens | None:
    """Returns the tokens of requests, each with pages, whose page numbers are not checked."""
    if not (last := _numbers(last_page_len)):
        return None  # most often of many requests
    starts, bounds = _numbers(qo_indptr), _numbers(kv_indptr)
    if starts is None or bounds is None or not len(starts) == len(bounds) == len(last) + 1:
        return None
    kv_len = _keys_in_pages(bounds, last, page_size)
    return None if kv_len is None else _tokens(starts, bounds, kv_len, last, indices)


def decode(kv_indptr: Any, last_page_len: Any, indices: Any, page_size: int, q_len: int) -> Tokens | None:
    """Returns the tokens of requests, each with pages and `q_len` query tokens, whose page numbers are not checked."""
    if not (last := _numbers(last_page_len)):
        return None
    bounds = _numbers(kv_indptr)
    if bounds is None or len(bounds) != len(last) + 1:
        return None
    starts, kv_len = list(range(0, q_len * len(bounds), q_len)), _keys_in_pages(bounds, last, page_size)
    return None if kv_len is None else _tokens(starts, bounds, kv_len, last, indices, q_len)


def _keys_in_pages(bounds: list[int], last: list[int], page_size: int) -> list[int] | None:
    """Returns the keys of requests, each with pages. `bounds` has one number more than `last`."""
    kv_len, begin = [], bounds[0]
    for i, tokens in enumerate(last, 1):
        end = bounds[i]
        if end <= begin or not 0 < tokens <= page_size:
            return None
        kv_len.append((end - begin - 1) * page_size + tokens)
        begin = end
    return kv_len


def ragged(qo_indptr: Any, kv_indptr: Any) -> Tokens | None:
    """Returns the tokens of requests."""
    starts, bounds = _numbers(qo_indptr), _numbers(kv_indptr)
    if not starts or not bounds or len(starts) != len(bounds) or len(bounds) < 2:
        return None
    kv_len = list(map(sub, bounds[1:], bounds))
    return None if min(kv_len) < 0 else _tokens(starts, bounds, kv_len, None, None)


def _numbers(value: Any) -> list[int] | None:
    """Returns the numbers of a short index array on the host."""
    if type(value) is not torch.Tensor or not value.is_cpu or value.dtype not in INDEX_DTYPES:
        return None
    if value.layout is not STRIDED or value.is_neg() or value.dim() != 1 or value.numel() > FEW + 1:
        return None
    numbers: list[int] = value.tolist()
    return numbers


def _tokens(
    starts: list[int],
    bounds: list[int],
    kv_len: list[int],
    last: list[int] | None,
    indices: Any,
    q_len: int | None = None,
) -> Tokens | None:
    qo_len = list(map(sub, starts[1:], starts))
    if min(qo_len) < 0 or starts[0] < 0 or bounds[0] < 0:
        return None
    lengths = BatchLengths.of_lists((starts, qo_len, bounds, kv_len))
    if lengths.rows > MAX_INDEX or bounds[-1] > MAX_INDEX or lengths.longest_kv > MAX_KV_LEN:
        return None
    return Tokens(lengths, bounds, last, indices, q_len)
