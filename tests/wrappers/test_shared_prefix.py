"""Wrappers of a batch with one shared prefix, against attention over prefix and own keys together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import (
    ArgumentError,
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    NotPlannedError,
)
from tests.support.dense_attention import assert_near, attention, random
from tests.support.executors import DEVICES

HEADS, KV_HEADS, DIM, PAGE, PREFIX = 4, 2, 64, 4, 21
QO, KV = (3, 1, 5), (9, 1, 6)
QO_INDPTR = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
INDPTR, INDICES = torch.tensor([0, 3, 4, 6], dtype=torch.int32), torch.tensor([4, 0, 5, 1, 3, 2], dtype=torch.int32)
PAGES = INDPTR, INDICES, torch.tensor([1, 1, 2])
SIZES = HEADS, KV_HEADS, DIM, PAGE


class Batch:
    def __init__(self, rows: int, device: str, layout: str, dtype: torch.dtype = torch.float16) -> None:
        self.q = random(rows, HEADS, DIM, dtype=dtype, seed=1)
        self.prefix = random(2, PREFIX, KV_HEADS, DIM, dtype=dtype, seed=2)
        self.cache = random(6, 2, PAGE, KV_HEADS, DIM, dtype=dtype, seed=3)
        prefix, cache = self.prefix, self.cache
        if layout == "HND":
            prefix, cache = prefix.transpose(1, 2).contiguous(), cache.transpose(2, 3).contiguous()
        self.given = self.q.to(device), *prefix.to(device), cache.to(device)

    def expected(self, qo_lens: tuple[int, ...], causal: bool, sm_scale: float | None = None) -> Any:
        outs, row = [], 0
        for i, (qo_len, kv_len) in enumerate(zip(qo_lens, KV, strict=True)):
            own = self.cache[PAGES[1][PAGES[0][i] : PAGES[0][i + 1]]].transpose(0, 1).flatten(1, 2)[:, :kv_len]
            keep = torch.ones(qo_len, PREFIX + kv_len, dtype=torch.bool)
            keep = keep.tril(PREFIX + kv_len - qo_len) if causal else keep
            outs.append(attention(self.q[row : row + qo_len], *torch.cat((self.prefix, own), 1), keep, sm_scale))
            row += qo_len
        return tuple(map(torch.cat, zip(*outs, strict=True)))


def workspace(device: str) -> torch.Tensor:
    return torch.zeros(8 << 20, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("forms", [("begin_forward", "forward"), ("plan", "run")])
def test_decode(forms: tuple[str, str], layout: str, device: str) -> None:
    batch = Batch(3, device, layout)
    wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    getattr(wrapper, forms[0])(*(x.to(device) for x in PAGES), *SIZES)
    out = getattr(wrapper, forms[1])(*batch.given)
    assert_near(out, None, batch.expected((1, 1, 1), False))
    wrapper.end_forward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("causal", "sm_scale"), [(False, None), (True, 0.3)])
def test_prefill(causal: bool, sm_scale: float | None, layout: str, device: str) -> None:
    batch = Batch(sum(QO), device, layout)
    wrapper = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    wrapper.begin_forward(QO_INDPTR.to(device), *(x.to(device) for x in PAGES), *SIZES)
    wrapper.prewarm_paged_kv_stride_variant()
    out = wrapper.forward(*batch.given, causal=causal, sm_scale=sm_scale)
    assert_near(out, None, batch.expected(QO, causal, sm_scale))


def test_other_dtypes() -> None:
    batch = Batch(3, "cpu", "NHD", torch.bfloat16)
    wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    wrapper.begin_forward(*PAGES, *SIZES, data_type="bfloat16")
    assert_near(wrapper.forward(*batch.given), None, batch.expected((1, 1, 1), False))
    batch = Batch(sum(QO), "cpu", "NHD", torch.bfloat16)
    prefill = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    prefill.plan(QO_INDPTR, *PAGES, *SIZES, q_data_type=torch.bfloat16)
    assert_near(prefill.run(*batch.given), None, batch.expected(QO, False))


def test_errors_and_workspaces() -> None:
    batch = Batch(3, "cpu", "NHD")
    wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(NotPlannedError):
        wrapper.forward(*batch.given)
    wrapper.begin_forward(*PAGES, *SIZES)
    q, k, v, cache = batch.given
    with pytest.raises(ArgumentError, match="v_shared must have k's kv_len"):
        wrapper.forward(q, k, v[1:], cache)
    with pytest.raises(ArgumentError, match="paged_kv_cache"):
        wrapper.forward(q, k, v, cache[:, :, :2])
    empty = wrapper.forward(q, k[:0], v[:0], cache)  # without a prefix: the own keys alone
    own = wrapper._wrapper.run(q, cache)
    torch.testing.assert_close(empty, own, rtol=1e-3, atol=1e-3)
    wrapper.reset_workspace_buffer(workspace("cpu"), torch.zeros(8))
    with pytest.raises(NotPlannedError):
        wrapper.forward(*batch.given)
