"""NVFP4 keys and RoPE on fa3's transform warps, on a Hopper GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_attn import single_prefill_with_kv_cache
from tests.gpu import marks
from tests.support import batch_case, transformed_kv
from tests.support.batch_case import BatchCase, dims, heads, paged, ragged, random_batch_case
from tests.support.persistent_emulated import CUDA, FA3
from tests.support.right import assert_solved_again

pytestmark = list(marks.FA3_GPU)

RANDOM, CHUNK = 100, 20  # random cases with each change, and those of one test
CHANGES = {"nvfp4": transformed_kv.NVFP4, "rope": transformed_kv.ROPE}
LARGE = (
    paged((1, 700, 0, 33, 2048), (4000, 700, 12, 65, 5000), mask="causal", **heads(32, 8), **dims(128)),
    paged((300,) * 20, (1500,) * 20, page_size=64, dtype="bfloat16", **heads(8, 2), **dims(256)),
    ragged((1000, 1, 3000), (1000, 9000, 3000), mask="causal", dtype="bfloat16", **heads(8, 2)),
    ragged((513, 2), (4097, 3), **heads(4, 4), **dims(192, 128)),
)


@pytest.mark.parametrize("batch", [*transformed_kv.NVFP4_BATCHES, *transformed_kv.ROPE_BATCHES], ids=lambda x: x.id)
def test_batch(batch: BatchCase) -> None:
    assert_solved_again(batch, "fa3")


@pytest.mark.parametrize("batch", LARGE, ids=lambda batch: batch.id)
@pytest.mark.parametrize("change", CHANGES)
def test_large(change: str, batch: BatchCase) -> None:
    assert_solved_again(dataclasses.replace(batch, **CHANGES[change]), "fa3")


@pytest.mark.parametrize("first", range(0, RANDOM, CHUNK))
@pytest.mark.parametrize("change", CHANGES)
def test_random(change: str, first: int) -> None:
    for seed in range(first, first + CHUNK):
        batch = dataclasses.replace(random_batch_case(seed), kv_dtype=None, pos_encoding_mode="NONE")
        batch = dataclasses.replace(batch, **CHANGES[change])
        if FA3.takes(batch_case.features(batch, CUDA)):
            assert_solved_again(batch, "fa3")


def test_rope_far_from_the_start() -> None:
    """Keys at positions up to 2^20 agree with fa2's."""
    q = torch.randn(80, 2, 128, device="cuda").bfloat16()
    k, v = (torch.randn(1 << 20, 1, 128, device="cuda").bfloat16() for _ in "kv")
    options = {"causal": True, "window_left": 300, "pos_encoding_mode": "ROPE_LLAMA", "return_lse": True}
    (o2, lse2), (o3, lse3) = (single_prefill_with_kv_cache(q, k, v, backend=name, **options) for name in ("fa2", "fa3"))
    torch.testing.assert_close(o3, o2, rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(lse3, lse2, rtol=0, atol=1e-3)
