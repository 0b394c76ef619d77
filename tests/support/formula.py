"""Attention by its formula, in fp64 numpy: row by row for single requests, request by request for batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tests.support.batch_case import BatchCase, BatchInputs
from tests.support.case import Case, Inputs
from tests.support.dense_attention import attention, seen


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


def visible(case: Case | BatchCase, keep: torch.Tensor | None, qo_len: int, kv_len: int) -> torch.Tensor:
    """A mask replaces causality; a window restricts both."""
    causal = keep is None and (case.mask == "causal" or case.kind == "decode")
    kept = seen(qo_len, kv_len, causal, case.window_left)
    return kept if keep is None else kept & keep


def formula(
    case: Case | BatchCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None, sinks: Any
) -> tuple[np.ndarray, np.ndarray]:
    """o and lse of a request, in the base of the case."""
    qo_len, kv_len = len(q), len(k)
    q_rows, k_rows = (torch.from_numpy(rotated(case, x, first)) for x, first in ((q, kv_len - qo_len), (k, 0)))
    slopes = [alibi_slope(head, case.num_qo_heads) for head in range(case.num_qo_heads)]
    distance = torch.arange(kv_len) - torch.arange(qo_len)[:, None]
    bias = torch.tensor(slopes).double()[:, None, None] * distance if case.pos_encoding_mode == "ALIBI" else 0.0
    kept = visible(case, keep, qo_len, kv_len)
    o, lse = attention(q_rows, k_rows, v, kept, case.scale, case.logits_soft_cap, sinks, bias)
    base = math.log(2) if getattr(case, "lse_base", "log2") == "ln" else 1.0
    return (o * (1.0 if case.v_scale is None else case.v_scale)).numpy(), (lse * base).numpy()


def single_formula(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    k, v, keep = inputs.k, inputs.v, inputs.custom_mask
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if inputs.packed_custom_mask is not None:
        bits = np.unpackbits(inputs.packed_custom_mask.numpy(), count=case.qo_len * case.kv_len, bitorder="little")
        keep = torch.from_numpy(bits).view(case.qo_len, case.kv_len).bool()
    return formula(case, inputs.q, k, v, keep, None)


def batch_formula(case: BatchCase, inputs: BatchInputs) -> tuple[np.ndarray, np.ndarray]:
    solved = [formula(case, r.q, r.k, r.v, r.keep, inputs.sinks) for r in inputs.requests]
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
