"""The reference in fp64 against torch's SDPA. All options, against a formula: `tests/api/test_cpu.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_attn.reference import attention as reference
from cute_attn.reference.attention import Logits, Mask, alibi_slopes, attention

F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return torch's attention of tensors `[len, heads, dim]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)
    return o[0].transpose(0, 1)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (5, 33), (33, 5)])
def test_full_attention(heads: tuple[int, int], dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    q, k = randn(lengths[0], heads[0], dims[0]), randn(lengths[1], heads[1], dims[0], seed=1)
    v = randn(lengths[1], heads[1], dims[1], seed=2)
    o, lse = attention(q, k, v)
    torch.testing.assert_close(o, sdpa(q, k, v))
    z = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(heads[0] // heads[1], 1)) / math.sqrt(dims[0])
    torch.testing.assert_close(lse, torch.log2(z.exp().sum(-1)))


def test_results_do_not_depend_on_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = randn(13, 4, 16), randn(11, 2, 16, seed=1), randn(11, 2, 16, seed=2)
    options: dict[str, Any] = {
        "logits": Logits(0.25, 2.0, alibi_slopes(4)),
        "mask": Mask(causal=True, window_left=6),
    }
    assert [len(alibi_slopes(heads)) for heads in (1, 6)] == [1, 6]
    whole = attention(q, k, v, **options)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 3 * 2 * 11 * 8)  # three rows per chunk
    for a, b in zip(attention(q, k, v, **options), whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])  # of hidden keys: tests/api/test_hidden_keys.py
def test_special_values_of_visible_keys_propagate(poison: float) -> None:
    q, k, v = randn(4, 2, 16), randn(4, 1, 16, seed=1), randn(4, 1, 16, seed=2)
    clean, _ = attention(q, k, v)
    v[2, 0, 5] = poison
    clean[:, :, 5] = poison
    torch.testing.assert_close(attention(q, k, v)[0], clean, equal_nan=True)


def test_products_of_16_bits_are_summed_in_fp64() -> None:
    """fp32 would round them."""
    q, k, v = randn(8, 2, 16).half(), randn(9, 2, 16, seed=1).half(), randn(9, 2, 16, seed=2).half()
    torch.testing.assert_close(attention(q, k, v)[0], sdpa(q.double(), k.double(), v.double()), rtol=1e-12, atol=1e-12)
