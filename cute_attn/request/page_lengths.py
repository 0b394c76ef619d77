"""Paged batches whose lengths are given in tokens, not as tokens of the last page."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import Tokens
from cute_attn.request import batch_plan, checks

NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


def paged(qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, page_size: int) -> Tokens:
    """Check the index arrays of a batch. Request i has the first `kv_len_arr[i]` tokens of its pages."""
    lengths = checks.readable(NAMES[3], kv_len_arr).cpu()
    pages = batch_plan.Pages(kv_indptr, kv_indices, torch.full_like(lengths, page_size))  # as if all were full
    tokens = batch_plan.paged(batch_plan.indptr(NAMES[0], qo_indptr), pages, page_size, NAMES)
    kv_len, room = lengths.numpy().astype(np.int64), tokens.lengths.kv_len
    wrong = (kv_len < 0) | (kv_len > room)
    if wrong.any():
        i = int(wrong.argmax())
        raise ArgumentError(
            f"{NAMES[3]} must be within 0..{room[i]}, the tokens of request {i}'s pages; got {kv_len[i]}"
        )
    return tokens._replace(lengths=tokens.lengths.replace(kv_len=kv_len))
