"""The single-request functions on CPU tensors, against the formula row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.batch_case import BatchCase
from tests.support.matrix import SMALL, Case, Inputs, call, make, poisoned_memory


def keys_of_row(case: Case, inputs: Inputs, i: int) -> list[int]:
    """The keys that row i sees."""
    position = i + case.kv_len - case.qo_len
    if inputs.custom_mask is not None:
        keys = [j for j in range(case.kv_len) if inputs.custom_mask[i, j]]
    elif inputs.packed_custom_mask is not None:
        packed, first = inputs.packed_custom_mask.tolist(), i * case.kv_len
        keys = [j for j in range(case.kv_len) if packed[(first + j) // 8] >> (first + j) % 8 & 1]
    else:
        keys = [j for j in range(case.kv_len) if case.mask != "causal" or j <= position]
    return keys if case.window_left < 0 else [j for j in keys if j >= position - case.window_left]


def rotated(case: Case | BatchCase, x: torch.Tensor, first_position: int) -> np.ndarray:
    """RoPE as a product of complex numbers, rounded to q's dtype as tensor cores need it. `x`: `[len, heads, dim]`."""
    values, half = x.double().numpy(), x.shape[2] // 2
    if case.pos_encoding_mode == "ROPE_LLAMA":
        turns = case.rope_theta ** (-np.arange(half) / half) / case.rope_scale
        positions = first_position + np.arange(x.shape[0])
        z = (values[..., :half] + 1j * values[..., half:]) * np.exp(1j * positions[:, None, None] * turns)
        dtype = getattr(torch, case.dtype)
        values = torch.from_numpy(np.concatenate((z.real, z.imag), -1)).to(dtype).double().numpy()
    return values


def alibi_slope(head: int, num_heads: int) -> float:
    n = 2 ** math.floor(math.log2(num_heads))
    return 2 ** (-8 * (head + 1) / n) if head < n else 2 ** (-4 * (2 * (head - n) + 1) / n)


def formula(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    k, v = inputs.k, inputs.v
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    q_rows, k_rows = rotated(case, inputs.q, case.kv_len - case.qo_len), rotated(case, k, 0)
    v_rows = v.double().numpy()
    o = np.zeros((case.qo_len, case.num_qo_heads, case.head_dim_vo))
    lse = np.full((case.qo_len, case.num_qo_heads), -math.inf)
    for i in range(case.qo_len):
        keys = keys_of_row(case, inputs, i)
        for head in range(case.num_qo_heads if keys else 0):
            kv_head = head // (case.num_qo_heads // case.num_kv_heads)
            z = k_rows[keys, kv_head] @ q_rows[i, head] * case.scale
            if case.pos_encoding_mode == "ALIBI":
                z = z + alibi_slope(head, case.num_qo_heads) * (np.array(keys) - i)
            if case.logits_soft_cap:
                z = case.logits_soft_cap * np.tanh(z / case.logits_soft_cap)
            weights = np.exp(z)
            o[i, head] = weights @ v_rows[keys, kv_head] / weights.sum()
            lse[i, head] = np.log2(weights.sum())
    return o * (1.0 if case.v_scale is None else case.v_scale), lse


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_single(case: Case) -> None:
    inputs = make(case)
    with poisoned_memory():
        out, lse = call(case, inputs)
    o_ref, lse_ref = formula(case, inputs)
    if case.kind == "decode":
        o_ref, lse_ref = o_ref[0], lse_ref[0]
    assert out.dtype == getattr(torch, case.o_dtype or case.dtype)
    ulp = torch.finfo(out.dtype).eps  # the reference computes in fp32: only the output is rounded
    np.testing.assert_allclose(out.double().numpy(), o_ref, rtol=ulp, atol=1e-4 * ulp + 2e-6)
    assert not out[torch.from_numpy(np.isinf(lse_ref))].any()
    if case.return_lse:
        assert lse is not None
        assert lse.dtype == torch.float32
        np.testing.assert_allclose(lse.numpy(), lse_ref, rtol=1e-6, atol=1e-5)
