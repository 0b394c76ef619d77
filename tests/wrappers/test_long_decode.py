"""Decode wrappers that plan long and short requests in turn: "auto" takes one backend, and results are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import BatchDecodeWithPagedKVCacheWrapper
from cute_attn.emulator.settings import using
from tests.support.dense_attention import decoded

PAGE_SIZE, HEADS, HEAD_DIM = 16, (16, 4), 128
LONG, SHORT = (161, 70), (9, 40)


def pages(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns indptr, indices and last_page_len of pages in reverse order."""
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    indptr = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    indices = torch.arange(sum(counts) - 1, -1, -1, dtype=torch.int32)
    return indptr, indices, torch.tensor([n - (c - 1) * PAGE_SIZE for n, c in zip(lengths, counts, strict=True)])


def plan(wrapper: Any, lengths: tuple[int, ...]) -> str:
    """Plans, and returns the name of the backend whose kernels run."""
    indptr, indices, last = pages(lengths)
    wrapper.plan(indptr, indices, last.int(), *HEADS, HEAD_DIM, PAGE_SIZE, q_data_type="bfloat16")
    return str(wrapper._planned().launch.on[1])


@pytest.mark.emulator
def test_long_and_short_requests_take_xqa() -> None:
    """But not the same kernel: clusters share those of more than 144 keys."""
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(16, 2, PAGE_SIZE, HEADS[1], HEAD_DIM, generator=generator).bfloat16()
    q = torch.randn(2, HEADS[0], HEAD_DIM, generator=generator).bfloat16()
    with using("sm_90a") as emulation:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8), backend="emulator")
        for lengths in (LONG, SHORT, LONG):
            assert plan(wrapper, lengths) == "xqa"
            out = wrapper.run(q, cache)
            _, indices, _ = pages(lengths)
            truth = decoded(q, cache, lengths, indices)[0]
            torch.testing.assert_close(out.double(), truth, rtol=2e-2, atol=2e-3)
    assert [record.spec["work"] for record in emulation.records] == ["cluster", "whole", "cluster"]


def test_captured_launches_take_one_backend_for_all_lengths() -> None:
    buffers = torch.empty(3, dtype=torch.int32), torch.empty(200, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    with using("sm_90a"):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(32 << 20, dtype=torch.uint8),
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffers[0],
            paged_kv_indices_buffer=buffers[1],
            paged_kv_last_page_len_buffer=buffers[2],
            backend="emulator",
        )
        assert [plan(wrapper, lengths) for lengths in (LONG, SHORT, LONG)] == ["xqa"] * 3
