"""Index arrays of few requests: read and checked as lists, which takes half the time of arrays of a few numbers.

The functions return None for what is not on the host, not plain, or wrong: `batch_plan` tells what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub
from typing import Any

import numpy as np
import torch

from cute_attn.problem import BatchLengths, Tokens
from cute_attn.request.settings import MAX_INDEX, MAX_KV_LEN

FEW = 8  # requests
INDEX_DTYPES = (torch.int32, torch.int64)


def paged(qo_indptr: Any, kv_indptr: Any, last_page_len: Any, indices: Any, page_size: int) -> Tokens | None:
    """Returns the tokens of requests, each with pages, whose page numbers are not checked."""
    starts, bounds, last = _numbers(qo_indptr), _numbers(kv_indptr), _numbers(last_page_len)
    if starts is None or bounds is None or not last or not len(starts) == len(bounds) == len(last) + 1:
        return None
    pages = list(map(sub, bounds[1:], bounds))
    if min(pages) < 1 or min(last) < 1 or max(last) > page_size:
        return None
    kv_len = [(count - 1) * page_size + tokens for count, tokens in zip(pages, last, strict=True)]
    return _tokens(starts, bounds, kv_len, last, indices)


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
    if value.layout is not torch.strided or value.is_neg() or value.dim() != 1 or value.numel() > FEW + 1:
        return None
    numbers: list[int] = value.tolist()
    return numbers


def _tokens(
    starts: list[int], bounds: list[int], kv_len: list[int], last: Sequence[int] | None, indices: Any
) -> Tokens | None:
    qo_len = list(map(sub, starts[1:], starts))
    longest = max(kv_len)
    if min(qo_len) < 0 or starts[0] < 0 or bounds[0] < 0 or longest > MAX_KV_LEN:
        return None
    if starts[-1] > MAX_INDEX or bounds[-1] > MAX_INDEX:
        return None
    n = len(kv_len)
    ints = np.array((*starts, *bounds, *kv_len, *qo_len, *(last or ())), np.int64)
    lengths = BatchLengths(ints[: n + 1], ints[n + 1 : 2 * n + 1], ints[2 * n + 2 : 3 * n + 2])
    lengths.know(ints[3 * n + 2 : 4 * n + 2], max(qo_len), n - qo_len.count(0), longest)
    return Tokens(lengths, ints[n + 1 : 2 * n + 2], None if last is None else ints[4 * n + 2 :], indices)
