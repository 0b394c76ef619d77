"""Paged decode calls on every kernel that takes them: what tests with caches of their own share."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from cute_attn import BatchDecodeWithPagedKVCacheWrapper
from cute_attn.emulator.settings import using

KERNELS = [
    pytest.param(None, id="reference"),
    *(
        pytest.param((arch, kernels), id=f"{arch} {kernels}")
        for arch, kernels in (
            *(("sm_80", "fa2"), ("sm_90a", "fa2"), ("sm_90a", "fa3"), ("sm_90a", "xqa")),
            *(("sm_100a", "fa4"), ("sm_100a", "xqa")),
        )
    ),
]
PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 64


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def wrapper(kernels: tuple[str, str] | None) -> BatchDecodeWithPagedKVCacheWrapper:
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    return BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", backend="emulator" if kernels else "reference")


def emulated(kernels: tuple[str, str] | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if kernels is None else using(kernels[0], kernels=kernels[1])


def tokens(cache: torch.Tensor, pages: list[int], kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values of a request."""
    k, v = cache[pages].unbind(1)
    return k.flatten(0, 1)[:kv_len], v.flatten(0, 1)[:kv_len]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns what rows of q that see all keys attend to, in fp64."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) / math.sqrt(DIM)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)
