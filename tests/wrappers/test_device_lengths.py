"""Plans of decode batches whose index arrays are on the GPU: the host does not look at their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import BatchDecodeWithPagedKVCacheWrapper
from cute_attn.emulator.settings import using
from cute_attn.errors import ArgumentError, ArgumentTypeError, RuntimeArgumentError
from cute_attn.problem import DeviceLengths
from cute_attn.wrappers import plan_request
from tests.support.dense_attention import decoded

PAGE_SIZE, HEADS, HEAD_DIM = 16, (4, 2), 64
BATCHES = (  # lengths, and the dtype of the index arrays
    ((5, 33, 16), torch.int32),
    ((48, 0, 1), torch.int64),
    ((17, 17, 64), torch.int32),
)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """CPU tensors count as tensors on the GPU. Counts how often the host reads lengths."""
    reads: list[int] = []
    host = DeviceLengths.host.func

    def counted(self: DeviceLengths) -> Any:
        reads.append(1)
        return host(self)

    monkeypatch.setattr(plan_request, "_is_on", lambda device, x: True)
    monkeypatch.setattr(DeviceLengths, "host", property(counted))
    return reads


def pages_of(lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns indptr, indices and last_page_len."""
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    last = [n - (c - 1) * PAGE_SIZE if n else 7 for n, c in zip(lengths, counts, strict=True)]
    indices = torch.randperm(20, generator=torch.Generator().manual_seed(sum(lengths)))[: sum(counts)]
    indptr = torch.tensor([0, *np.cumsum(counts)], dtype=dtype)
    return indptr, indices.to(dtype), torch.tensor(last, dtype=dtype)


@pytest.mark.parametrize("graph", [False, True])
def test_lengths_are_computed_on_the_device(graph: bool, on_gpu: list[int]) -> None:
    """Plans of three batches, one after the other; with CUDA graphs the wrapper's buffers receive the index arrays."""
    torch.manual_seed(0)
    cache = torch.randn(20, 2, PAGE_SIZE, HEADS[1], HEAD_DIM).half()
    buffers = {
        "paged_kv_indptr_buffer": torch.zeros(4, dtype=torch.int32),
        "paged_kv_indices_buffer": torch.zeros(40, dtype=torch.int32),
        "paged_kv_last_page_len_buffer": torch.zeros(3, dtype=torch.int32),
    }
    workspace = torch.empty(1 << 24, dtype=torch.uint8)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, use_cuda_graph=graph, backend="emulator", **(buffers if graph else {})
    )
    with using("sm_90a", kernels="xqa", sms=2):
        for lengths, dtype in BATCHES:
            indptr, indices, last = pages_of(lengths, dtype)
            q = torch.randn(3, HEADS[0], HEAD_DIM).half()
            wrapper.plan(indptr, indices, last, *HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=torch.float16)
            out = wrapper.run(q, cache)
            torch.testing.assert_close(out.double(), decoded(q, cache, lengths, indices)[0], atol=2e-3, rtol=2e-3)
            if graph:
                assert buffers["paged_kv_indptr_buffer"].tolist() == indptr.tolist()
                assert buffers["paged_kv_last_page_len_buffer"].tolist() == last.tolist()
        assert not on_gpu
        assert wrapper._max_kv_len == 64  # now the host reads them
        assert on_gpu
        last += 0
        with pytest.raises(RuntimeArgumentError, match="must not be written after plan"):
            _ = wrapper._max_kv_len


def test_a_plan_of_other_lengths_keeps_the_launch_and_the_replays() -> None:
    """Lengths on the host: the records are replaced, and replays remain, also where the page numbers move."""
    torch.manual_seed(0)
    cache, kept = torch.randn(20, 2, PAGE_SIZE, HEADS[1], HEAD_DIM).half(), torch.zeros(20, dtype=torch.int32)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 24, dtype=torch.uint8), backend="emulator")
    launches, replays = [], []
    with using("sm_90a", kernels="xqa", sms=2):
        for i, (lengths, _) in enumerate((*BATCHES, BATCHES[0])):
            indptr, indices, last = pages_of(lengths, torch.int32)
            kept[: len(indices)] = indices
            q, used = torch.randn(3, HEADS[0], HEAD_DIM).half(), kept if i < 3 else kept.clone()
            wrapper.plan(indptr, used, last, *HEADS, HEAD_DIM, PAGE_SIZE)
            launches.append(wrapper._planned().launch)
            replays.append(len(wrapper._planned().cached_runs))
            wanted = decoded(q, cache, lengths, indices)[0]
            for _ in range(2):
                torch.testing.assert_close(wrapper.run(q, cache).double(), wanted, atol=2e-3, rtol=2e-3)
            assert wrapper._max_kv_len == max(lengths)
        wrapper.plan(indptr, used, last, *HEADS, HEAD_DIM, PAGE_SIZE, sm_scale=0.5)
    assert len({id(launch) for launch in launches}) == 1
    assert replays == [0, 1, 1, 1]
    assert wrapper._planned().launch is not launches[0]
    with pytest.raises(ArgumentTypeError):
        wrapper.plan(indptr, used, last, *HEADS, HEAD_DIM, PAGE_SIZE, sm_scale=True)


def test_a_request_gets_no_pages_that_are_not_there(on_gpu: list[int]) -> None:
    """Numbers that only `CUTE_ATTN_VALIDATE=1` would refuse lead to no access outside the page numbers."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 24, dtype=torch.uint8), backend="emulator")
    cache = torch.ones(3, 2, PAGE_SIZE, HEADS[1], HEAD_DIM).half()
    indptr = torch.tensor([0, 2, 9, 5, 1 << 40], dtype=torch.int64)
    last = torch.tensor([99, 1, 1, 1])
    with using("sm_90a", kernels="xqa", sms=2):
        wrapper.plan(indptr, torch.arange(3).int(), last, *HEADS, HEAD_DIM, PAGE_SIZE)
        out = wrapper.run(torch.ones(4, HEADS[0], HEAD_DIM).half(), cache)
    assert out[0].eq(1).all()
    assert out[1:].eq(0).all()


def test_what_is_wrong_without_a_look_at_the_numbers(on_gpu: list[int]) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="emulator")
    indptr, indices, last = pages_of(*BATCHES[0])
    with using("sm_90a", kernels="xqa"):
        for change, message in (
            ((indptr, indices, last[1:]), r"last_page_len must have shape \[batch_size\] = \(3,\)"),
            ((indptr.float(), indices, last), "indptr must have dtype"),
            ((indptr, indices[:, None], last), "indices must have 1 dimension"),
        ):
            with pytest.raises(ArgumentError, match=message):
                wrapper.plan(*change, *HEADS, HEAD_DIM, PAGE_SIZE)


def test_backends_with_a_schedule_read_lengths_on_the_host(on_gpu: list[int]) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))  # the reference
    lengths, dtype = BATCHES[0]
    indptr, indices, last = pages_of(lengths, dtype)
    cache, q = torch.randn(20, 2, PAGE_SIZE, HEADS[1], HEAD_DIM).half(), torch.randn(3, HEADS[0], HEAD_DIM).half()
    wrapper.plan(indptr, indices, last, *HEADS, HEAD_DIM, PAGE_SIZE)
    wanted = decoded(q, cache, lengths, indices)[0]
    indptr.zero_()  # the plan has read it
    torch.testing.assert_close(wrapper.run(q, cache).double(), wanted, atol=2e-3, rtol=2e-3)
