"""Attention by its formula, in fp64 numpy: row by row for single requests, request by request for batches."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.support.batch_case import BatchCase, BatchInputs, Request
from tests.support.case import Case, Inputs


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


def single_formula(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
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


def hidden(case: BatchCase, request: Request) -> np.ndarray:
    qo_len, kv_len = len(request.q), len(request.k)
    position = np.arange(qo_len)[:, None] + kv_len - qo_len
    key = np.arange(kv_len)[None]
    hide = np.zeros((qo_len, kv_len), bool)
    if request.keep is not None:
        hide |= ~request.keep.numpy()
    elif case.mask == "causal" or case.kind == "decode":
        hide |= key > position
    if case.window_left >= 0:
        hide |= key < position - case.window_left
    return hide


def request_formula(case: BatchCase, request: Request, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    qo_len, kv_len = len(request.q), len(request.k)
    q, k = rotated(case, request.q, kv_len - qo_len), rotated(case, request.k, 0)
    v, hide = request.v.numpy(), hidden(case, request)
    o = np.zeros((qo_len, case.num_qo_heads, case.head_dim_vo))
    lse = np.full((qo_len, case.num_qo_heads), -math.inf)
    for head in range(case.num_qo_heads):
        kv_head = head * case.num_kv_heads // case.num_qo_heads
        z = q[:, head] @ k[:, kv_head].T * case.scale
        if case.pos_encoding_mode == "ALIBI":
            z = z + alibi_slope(head, case.num_qo_heads) * (np.arange(kv_len)[None] - np.arange(qo_len)[:, None])
        if case.logits_soft_cap:
            z = case.logits_soft_cap * np.tanh(z / case.logits_soft_cap)
        weights = np.where(hide, 0.0, np.exp(z))
        total = weights.sum(1) + (0.0 if sinks is None else math.exp(sinks[head]))
        some = total > 0
        o[some, head] = weights[some] @ v[:, kv_head] / total[some, None]
        lse[some, head] = np.log(total[some])
    return o * (1.0 if case.v_scale is None else case.v_scale), lse / (1.0 if case.lse_base == "ln" else math.log(2))


def batch_formula(case: BatchCase, inputs: BatchInputs) -> tuple[np.ndarray, np.ndarray]:
    sinks = None if inputs.sinks is None else inputs.sinks.double().numpy()
    solved = [request_formula(case, request, sinks) for request in inputs.requests]
    o_first = np.zeros((case.first, case.num_qo_heads, case.head_dim_vo))
    lse_first = np.full((case.first, case.num_qo_heads), -math.inf)
    return np.concatenate([o_first, *(o for o, _ in solved)]), np.concatenate([lse_first, *(lse for _, lse in solved)])


def assert_single_right(case: Case, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    o_ref, lse_ref = single_formula(case, inputs)
    if case.kind == "decode":
        o_ref, lse_ref = o_ref[0], lse_ref[0]
    _assert_near(case, (out, lse), (o_ref, lse_ref), o_atol=2e-6, lse_rtol=1e-6)


def assert_batch_right(case: BatchCase, inputs: BatchInputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    _assert_near(case, (out, lse), batch_formula(case, inputs), o_atol=1e-5, lse_rtol=2e-6)


def _assert_near(
    case: Case | BatchCase,
    got: tuple[torch.Tensor, torch.Tensor | None],
    expected: tuple[np.ndarray, np.ndarray],
    o_atol: float,
    lse_rtol: float,
) -> None:
    """The reference computes in fp32: only the output is rounded."""
    (out, lse), (o_ref, lse_ref) = got, expected
    assert out.dtype == getattr(torch, case.o_dtype or case.dtype)
    ulp = torch.finfo(out.dtype).eps
    np.testing.assert_allclose(out.double().numpy(), o_ref, rtol=ulp, atol=1e-4 * ulp + o_atol)
    assert not out[torch.from_numpy(np.isinf(lse_ref))].any()
    if case.return_lse:
        assert lse is not None
        assert lse.dtype == torch.float32
        np.testing.assert_allclose(lse.numpy(), lse_ref, rtol=lse_rtol, atol=10 * lse_rtol)
