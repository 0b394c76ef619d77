"""Merged states against numpy in fp64. Against attention over all keys: `test_cascade.py`, `tests/engines`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import cute_attn

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}


def states(num: int, dtype: torch.dtype = torch.float32, n: int = 7, heads: int = 3, dim: int = 5) -> tuple[Any, Any]:
    """Random states, some rows of which have no keys: in one of them, in all of them, with NaN in v."""
    generator = torch.Generator().manual_seed(num)
    v = torch.randn(n, num, heads, dim, generator=generator).to(dtype)
    s = torch.randn(n, num, heads, generator=generator) * 20
    s[0, :1], v[0, :1] = -torch.inf, torch.nan
    s[1] = -torch.inf
    s[2, :, 0] = -torch.inf
    return v, s


def expected(v: torch.Tensor, s: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    v64, s64 = v.double().numpy(), s.double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp2(s64)
        total = weights.sum(1)
        merged = np.where(weights[..., None] > 0, weights[..., None] * v64, 0).sum(1) / total[..., None]
        return np.where(total[..., None] > 0, merged, 0), np.log2(total)


def check(result: tuple[torch.Tensor, torch.Tensor], v: torch.Tensor, s: torch.Tensor) -> None:
    want_v, want_s = expected(v, s)
    assert result[0].dtype == v.dtype
    assert result[1].dtype == torch.float32
    np.testing.assert_allclose(result[0].double().numpy(), want_v, rtol=TOLERANCE[v.dtype], atol=TOLERANCE[v.dtype])
    np.testing.assert_allclose(result[1].numpy(), want_s, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num", [1, 2, 5])
def test_merge_states(num: int, dtype: torch.dtype) -> None:
    v, s = states(num, dtype)
    check(cute_attn.merge_states(v, s), v, s)
    if num == 2:
        check(cute_attn.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), v, s)


@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_large_lse_neither_overflows_nor_vanishes(shift: float) -> None:
    v, s = states(3)
    merged, lse = cute_attn.merge_states(v, s + shift)
    want_v, want_s = expected(v, s)
    np.testing.assert_allclose(merged.numpy(), want_v, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(lse.numpy(), want_s + shift, rtol=1e-6)


def test_no_states_are_a_state_without_keys() -> None:
    v, s = cute_attn.merge_states(torch.empty(2, 0, 3, 4, dtype=torch.float16), torch.empty(2, 0, 3))
    assert (v.shape, v.dtype, s.dtype) == ((2, 3, 4), torch.float16, torch.float32)
    assert not v.any()
    assert (s == -torch.inf).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.uint8])
def test_merge_state_in_place(mask_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    both_v, both_s = states(2, dtype)
    wide = torch.zeros(7, 6, 5, dtype=dtype)
    v, s = wide[:, ::2], both_s[:, 0].clone()  # strided
    v.copy_(both_v[:, 0])
    v[3, 0] = -0.0
    mask = None if mask_dtype is None else torch.tensor([0, 1, 1, 0, 1, 0, 1], dtype=mask_dtype)
    before = v.clone(), s.clone()
    want = cute_attn.merge_state(v, s, both_v[:, 1], both_s[:, 1])
    assert cute_attn.merge_state_in_place(v, s, both_v[:, 1], both_s[:, 1], mask) is None
    merged = torch.ones(7, dtype=torch.bool) if mask is None else mask != 0
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    for result, kept, new in ((v, before[0], want[0]), (s, before[1], want[1])):
        kind = integer if result is v else torch.int32
        assert torch.equal(result[merged].view(kind), new[merged].view(kind))
        assert torch.equal(result[~merged].view(kind), kept[~merged].view(kind))
    assert not wide[:, 1::2].any()
