"""The reference in fp64. All options, against a formula: `tests/api/test_cpu.py`."""

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


def test_results_do_not_depend_on_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = randn(13, 4, 16), randn(11, 2, 16, seed=1), randn(11, 2, 16, seed=2)
    options: dict[str, Any] = {"logits": Logits(0.25, 2.0, alibi_slopes(4)), "mask": Mask(causal=True, window_left=6)}
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
    tensors = [randn(n, 2, 16, seed=i).half() for i, n in enumerate((8, 9, 9))]
    q, k, v = (x.double().transpose(0, 1) for x in tensors)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)
    torch.testing.assert_close(attention(*tensors)[0], expected, rtol=1e-12, atol=1e-12)
