"""A finite sink whose base-2 value exceeds fp32 takes all the weight: outputs are 0, and lse is the sink."""

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


@pytest.mark.emulator
@pytest.mark.parametrize("sink", [2e38, 2.5e38, 3.4e38])
@pytest.mark.parametrize("kernels", KERNELS)
def test_huge_sinks_take_all_the_weight(kernels: tuple[str, str] | None, sink: float) -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(4, 2, PAGE, KV_HEADS, DIM).bfloat16(), torch.randn(2, HEADS, DIM).bfloat16()
    sinks = torch.full((HEADS,), sink)
    sinks[1] = -math.inf  # this head has no sink
    made = wrapper(kernels)
    with emulated(kernels):
        made.plan(ints(0, 2, 4), ints(0, 1, 2, 3), ints(4, 14), HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
        out, lse = made.run(q, cache, return_lse=True, sinks=sinks)
    want = torch.full((2, HEADS), sink, dtype=torch.float64).mul(math.log2(math.e)).float()  # beyond fp32: +inf
    others = [0, 2, 3]
    assert not out[:, others].any()
    torch.testing.assert_close(lse[:, others], want[:, others])
    for i, (pages, kv_len) in enumerate((([0, 1], 20), ([2, 3], 30))):
        k, v = tokens(cache, pages, kv_len)
        assert (out[i, 1].double() - attention(q[i : i + 1], k, v)[0, 1]).abs().max() < 1e-2
