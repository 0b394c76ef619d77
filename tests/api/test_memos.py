"""What calls leave behind: after ten thousand calls that differ, no more objects than after a thousand."""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_attn import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache, single_prefill_with_kv_cache
from cute_attn.dispatch import backends, capabilities, select
from cute_attn.kernels.fa2.host.family import FAMILY
from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.host import gpu as loading
from cute_attn.kernels.host import single as host_single
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.prepared import MAX_PREPARED
from cute_attn.kernels.host.prepared import prepared as prepared_kernel
from cute_attn.kernels.host.single import SingleRun
from cute_attn.runtime import arch as archs
from cute_attn.runtime import launch
from cute_attn.runtime.artifact import Artifact
from cute_attn.wrappers import calls
from tests.support.named_launches import params_of
from tests.support.stub_driver import StubDriver, forget_loaded

WARM, CALLS = 1_000, 10_000
SLACK = 4_000  # memos that few of these calls fill; a leak of one object per call is more

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
    assert growth(call, calls=5_000) < SLACK  # 1.4 ms each; a leak of one object per call is more than SLACK, too


def test_plans_and_runs_on_the_reference() -> None:
    """Ten settings and a thousand lengths, and runs whose scales differ."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    cache = torch.zeros(40, 2, 4, 2, 64, dtype=torch.float16)
    indptr, indices = torch.tensor([0, 20, 40], dtype=torch.int32), torch.arange(40, dtype=torch.int32)

    def call(i: int) -> None:
        last = torch.tensor([1 + i % 4, 1 + i // 4 % 4], dtype=torch.int32)
        wrapper.plan(indptr, indices, last, 4, 2, 64, 4, sm_scale=1 + i / 65536, q_data_type="float16")
        wrapper.run(q[:2], cache, k_scale=1 + i / 65536)

    assert growth(call, 600, 1000) < SLACK


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDriver]:
    """Calls with CPU tensors go to fa2 on a pretended H200, whose driver does nothing."""
    params = params_of(Fa2Spec("float16", "float16", 64, 64))
    driver = StubDriver(params)

    def get(spec: Any, arch: str, program_of: Any) -> Artifact:
        return Artifact("sm_90a", "kernel", spec.key().encode(), "", params, (128, 1, 1), 0, 0, 0, 0, {})

    monkeypatch.setattr(launch, "load_driver", lambda: driver)
    monkeypatch.setattr(archs, "for_device", lambda index: archs.named("sm_90a"))
    monkeypatch.setattr(loading, "artifacts", SimpleNamespace(get=get))
    monkeypatch.setattr(host_single, "current_stream", lambda index: 7)
    monkeypatch.setattr(select, "choose", lambda features, backend_name="auto", **known: capabilities.BY_NAME["fa2"])
    on_gpu = SimpleNamespace(prepare=lambda settings: FAMILY.prepare(settings, Gpu(archs.named("sm_90a"), 0, 132)))
    monkeypatch.setitem(backends.IMPLEMENTATIONS, "fa2", on_gpu)
    memos = select.chosen, loading.load, prepared_kernel
    for forget in (calls.forget, forget_loaded, *(memo.cache_clear for memo in memos)):
        forget()
    yield driver
    for forget in (calls.forget, forget_loaded, *(memo.cache_clear for memo in memos)):
        forget()


@pytest.mark.parametrize("call", [with_scale, with_v_scale, with_lengths, with_heads])
def test_calls_on_a_gpu(call: Call, stub: StubDriver) -> None:
    def fire(i: int) -> None:
        call(i)
        assert stub.launches
        stub.launches.clear()

    assert growth(fire) < SLACK
    gc.collect()
    counts = collections.Counter(map(type, gc.get_objects()))
    assert counts[SingleRun] <= MAX_PREPARED
    assert counts[launch.Launch] <= loading.MAX_KERNELS
    assert len([call for call in stub.calls if call[0] == "load"]) == len(launch._libraries)
    for forget in (calls.forget, prepared_kernel.cache_clear):
        forget()
    gc.collect()
    assert SingleRun not in set(map(type, gc.get_objects()))


def test_a_dropped_kernel_is_not_loaded_again(stub: StubDriver) -> None:
    """The driver never unloads a kernel, which captured graphs may hold: loading it again would leak."""
    for _ in range(3):
        with_scale(0)
        for memo in (loading.load, prepared_kernel):
            memo.cache_clear()
    assert [call[0] for call in stub.calls].count("load") == 1
