"""Calls that a CUDA graph may hold, on tensors without values: what needs these, or a size that depends on them, fails.
Nor is a tensor made of Python's numbers, whose copy from the host could not be captured. Appends of NVFP4 rows:
`test_nvfp4_caches.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import cute_attn


@pytest.fixture(autouse=True)
def _no_numbers_from_the_host() -> Iterator[None]:
    with mock.patch.object(torch, "tensor", side_effect=AssertionError):
        yield


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="meta")


INTS, ONE = meta(7, dtype=torch.int32), meta(1)


def test_appends() -> None:
    requests, positions = cute_attn.get_batch_indices_positions(INTS[:3], INTS[:2], 7)
    where = requests, positions, meta(5, 2, 4, 3, 8), INTS, INTS[:3], INTS[:2]
    cute_attn.append_paged_kv_cache(meta(7, 3, 8), meta(7, 3, 8), *where)
    assert cute_attn.get_seq_lens(INTS[:3], INTS[:2], 4).shape == (2,)


def test_merges() -> None:
    v, s = meta(4, 5, 3, 2), meta(4, 5, 3)
    assert cute_attn.merge_states(v, s)[0].shape == (4, 3, 2)
    cute_attn.merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1], s[:, 0, 0].bool())


def test_nvfp4() -> None:
    packed, scales = cute_attn.nvfp4_kv_quantize(meta(10, 32), ONE)
    assert cute_attn.nvfp4_kv_dequantize(packed, scales, ONE).shape == (10, 32)
    cache, sf = (meta(3, 2, 4, 2, n, dtype=torch.uint8) for n in (16, 2))
    outputs = meta(2, 2, 6, 2, 32, dtype=torch.float16)
    cute_attn.nvfp4_kv_dequantize_paged(cache, sf, INTS[:2].expand(2, 2), INTS[:2], ONE, ONE, *outputs)
