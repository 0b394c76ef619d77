"""Wrappers of a batch with one shared prefix, against attention over prefix and own keys together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import BatchDecodeWithSharedPrefixPagedKVCacheWrapper, BatchPrefillWithSharedPrefixPagedKVCacheWrapper
from cute_attn.errors import ArgumentError, NotPlannedError
from tests.support.batch_case import heads, make, paged
from tests.support.dense_attention import assert_near, attention, random, seen
from tests.support.engine_case import workspace

STEP, QO, KV = (1, 1, 1), (3, 1, 5), (9, 1, 6)
SIZES = 4, 2, 64, 4


class Batch:
    """Requests with keys of their own behind 21 that all share."""

    def __init__(self, qo_lens: tuple[int, ...], device: str = "cpu", layout: str = "NHD", dtype: str = "float16"):
        case = paged(qo_lens, KV, page_size=4, kv_layout=layout, cache="one", dtype=dtype, **heads(4, 2))
        self.inputs = make(case, device)
        self.prefix = random(2, 21, 2, 64, dtype=getattr(torch, dtype), seed=2)
        prefix = self.prefix if layout == "NHD" else self.prefix.transpose(1, 2).contiguous()
        self.given = self.inputs.q, *prefix.to(device), *self.inputs.kv
        index = self.inputs.qo_indptr, self.inputs.kv_indptr, self.inputs.kv_indices, self.inputs.last_page_len
        self.qo_indptr, *self.pages = (x.to(device) for x in index)

    def expected(self, causal: bool = False, sm_scale: float | None = None) -> Any:
        found = []
        for request in self.inputs.requests:
            pairs = zip(self.prefix.double(), (request.k, request.v), strict=True)
            k, v = (torch.cat(pair) for pair in pairs)
            found.append(attention(request.q, k, v, seen(len(request.q), len(k), causal), sm_scale))
        return tuple(map(torch.cat, zip(*found, strict=True)))


FORMS = pytest.mark.parametrize(
    ("plan", "run", "dtype"), [("begin_forward", "forward", "float16"), ("plan", "run", "bfloat16")]
)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@FORMS
def test_decode(plan: str, run: str, dtype: str, layout: str, device: str) -> None:
    batch = Batch(STEP, device, layout, dtype)
    wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    getattr(wrapper, plan)(*batch.pages, *SIZES, data_type=dtype)
    assert_near(getattr(wrapper, run)(*batch.given), None, batch.expected())
    wrapper.end_forward()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("causal", "sm_scale"), [(False, None), (True, 0.3)])
@FORMS
def test_prefill(
    plan: str, run: str, dtype: str, causal: bool, sm_scale: float | None, layout: str, device: str
) -> None:
    batch = Batch(QO, device, layout, dtype)
    wrapper = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    getattr(wrapper, plan)(batch.qo_indptr, *batch.pages, *SIZES, q_data_type=getattr(torch, dtype))
    wrapper.prewarm_paged_kv_stride_variant()
    out = getattr(wrapper, run)(*batch.given, causal=causal, sm_scale=sm_scale)
    assert_near(out, None, batch.expected(causal, sm_scale))


def test_errors_and_workspaces() -> None:
    batch = Batch(STEP)
    wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(NotPlannedError):
        wrapper.forward(*batch.given)
    wrapper.begin_forward(*batch.pages, *SIZES)
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
