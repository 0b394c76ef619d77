"""Settings of the emulator, and what its batches take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, BatchPrefillWithRaggedKVCacheWrapper, emulator, single_prefill_with_kv_cache


@pytest.mark.parametrize("sms", [0, -1, 1.5, True, "132"])
def test_sms_must_be_a_positive_count(sms: Any) -> None:
    with pytest.raises(ArgumentError, match="sms must be None or an int >= 1"), emulator.using("sm_90a", sms=sms):
        pass


@pytest.mark.emulator
def test_batch_copies_a_misaligned_q() -> None:
    """As on a GPU: the first run, and its replays. Misaligned k, v and out are refused there, and here."""
    q, k, v = (torch.randn(n, heads, 64).bfloat16() for n, heads in ((20, 4), (20, 2), (20, 2)))
    indptr = torch.tensor([0, 7, 20], dtype=torch.int32)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(x.numel() + 1, dtype=x.dtype)
        return buffer[1:].view(x.shape).copy_(x)

    with emulator.using("sm_90a", kernels="fa2"):
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="emulator")
        wrapper.plan(indptr, indptr, 4, 2, 64, causal=True, q_data_type="bfloat16")
        for scale in (1.0, 1.0, 2.0):
            x = shifted(q * scale)
            assert x.data_ptr() % 16
            expected = torch.cat(
                [single_prefill_with_kv_cache(x[a:b], k[a:b], v[a:b], causal=True) for a, b in ((0, 7), (7, 20))]
            )
            torch.testing.assert_close(wrapper.run(x, k, v), expected, rtol=2e-2, atol=2e-2)
        with pytest.raises(ArgumentError, match="k must have rows that start at multiples of 16 bytes"):
            wrapper.run(q, shifted(k), v)
