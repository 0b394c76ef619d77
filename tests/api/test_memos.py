"""What calls leave behind: no more objects once all memos are full."""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_attn import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache, single_prefill_with_kv_cache
from cute_attn.kernels.host import gpu as loading
from cute_attn.kernels.host.prepared import MAX_PREPARED
from cute_attn.kernels.host.prepared import prepared as prepared_kernel
from cute_attn.kernels.host.single import SingleRun
from cute_attn.runtime.launch import Launch
from cute_attn.wrappers import calls
from perf.pretended_gpu import NullDriver
from tests.support.entry_points import ENTRIES
from tests.support.launch_corpus import pretended

WARM, CALLS = MAX_PREPARED + 100, 1_500  # the largest memo is full after the first
SLACK = 1_000  # memos that few of these calls fill; a leak of one object per call is more

Call = Callable[[int], Any]

q, k, v = (torch.randn(n, heads, 64).half() for n, heads in ((3, 4), (7, 2), (7, 2)))


def with_scale(i: int) -> None:
    single_prefill_with_kv_cache(q, k, v, sm_scale=1.0 + i / 65536)


def with_v_scale(i: int) -> None:
    single_decode_with_kv_cache(q[0], k, v, v_scale=1.0 + i / 65536)


def with_lengths(i: int) -> None:
    qo_len = 1 + i % 97
    x = torch.zeros(qo_len, 1, 64, dtype=torch.float16)
    y = torch.zeros(qo_len + i // 97, 1, 64, dtype=torch.float16)
    single_prefill_with_kv_cache(x, y, y, causal=True)


def with_heads(i: int) -> None:
    x = torch.zeros(1, 1 + i % 2000, 64, dtype=torch.float16)
    single_prefill_with_kv_cache(x, x[:, :1], x[:, :1])


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def growth(call: Call, warm: int = WARM, calls: int = CALLS) -> int:
    """Returns how many objects more there are after all calls than after the first ones."""
    for i in range(warm):
        call(i)
    before = objects()
    for i in range(warm, warm + calls):
        call(i)
    return objects() - before


@pytest.mark.parametrize("call", [with_scale, with_v_scale, with_lengths, with_heads])
def test_calls_on_the_reference(call: Call) -> None:
    assert growth(call) < SLACK


def test_plans_and_runs_on_the_reference() -> None:
    """Ten settings and a thousand lengths, and runs whose scales differ."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    cache = torch.zeros(40, 2, 4, 2, 64, dtype=torch.float16)
    indptr, indices = torch.tensor([0, 20, 40], dtype=torch.int32), torch.arange(40, dtype=torch.int32)

    def call(i: int) -> None:
        last = torch.tensor([1 + i % 4, 1 + i // 4 % 4], dtype=torch.int32)
        wrapper.plan(indptr, indices, last, 4, 2, 64, 4, sm_scale=1 + i / 65536, q_data_type="float16")
        wrapper.run(q[:2], cache, k_scale=1 + i / 65536)

    assert growth(call, 600, 1000) < 500  # all memos are full; a leak of one object per call is more


@pytest.mark.parametrize("call", [with_scale, with_v_scale, with_lengths, with_heads])
def test_calls_on_a_gpu(call: Call) -> None:
    driver = NullDriver()
    with pretended(driver):
        assert growth(call) < SLACK
        assert driver.launches >= WARM + CALLS
        gc.collect()
        counts = collections.Counter(map(type, gc.get_objects()))
        assert 0 < counts[SingleRun] <= MAX_PREPARED
        assert 0 < counts[Launch] <= loading.MAX_KERNELS
        for forget in (calls.UNPLANNED.clear, prepared_kernel.cache_clear):
            forget()
        gc.collect()
        assert SingleRun not in set(map(type, gc.get_objects()))


def test_another_scale_of_latent_attention_prepares_nothing() -> None:
    with pretended(NullDriver()):
        entry, made = ENTRIES["latent"], []
        for scale in (0.1, 0.2):
            entry.begin(entry.tensors)({**entry.tensors, "bmm1_scale": scale})
            made.append(prepared_kernel.cache_info().misses)
    assert made[0] == made[1]
