"""Packed masks of batches have each request from a new byte on; another number of bytes is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, BatchPrefillWithRaggedKVCacheWrapper, packbits, segment_packbits

BOUNDS = torch.tensor([0, 1, 2]), torch.tensor([0, 9, 18])
MASK = torch.arange(18) % 3 != 1


def run(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, **mask: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(int(qo_indptr[-1]), 2, 16, generator=generator)
    k, v = torch.randn(2, int(kv_indptr[-1]), 2, 16, generator=generator)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1 << 16, dtype=torch.uint8))
    wrapper.plan(qo_indptr, kv_indptr, 2, 2, 16, q_data_type="float16", **mask)
    found = wrapper.run(q.half(), k.half(), v.half())
    assert isinstance(found, torch.Tensor)
    return found


def test_requests_start_at_bytes() -> None:
    packed, bytes_of_requests = segment_packbits(MASK, BOUNDS[1], bitorder="little")
    assert bytes_of_requests.tolist() == [0, 2, 4]
    assert torch.equal(run(*BOUNDS, packed_custom_mask=packed), run(*BOUNDS, custom_mask=MASK))


def test_one_row_of_bits_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"packed_custom_mask must have 4 bytes, .*segment_packbits.*got 3"):
        run(*BOUNDS, packed_custom_mask=packbits(MASK, bitorder="little"))


def test_one_request_is_one_row() -> None:
    one = torch.tensor([0, 2]), torch.tensor([0, 9])
    packed = packbits(MASK, bitorder="little")
    assert torch.equal(run(*one, packed_custom_mask=packed), run(*one, custom_mask=MASK))
