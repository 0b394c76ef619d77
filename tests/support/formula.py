"""Attention by its formula, in fp64, request by request."""

from __future__ import annotations

import math

import torch

from tests.support.batch_case import BatchCase, BatchInputs, Request
from tests.support.dense_attention import attention, seen


def rotated(case: BatchCase, x: torch.Tensor, first_position: int) -> torch.Tensor:
    """RoPE as a product of complex numbers, rounded to q's dtype as tensor cores need it. `x`: `[len, heads, dim]`."""
    if case.pos_encoding_mode != "ROPE_LLAMA":
        return x
    real, imaginary = x.double().chunk(2, 2)
    exponents = torch.arange(0, 1, 2 / x.shape[2], dtype=torch.float64)
    positions = first_position + torch.arange(len(x), dtype=torch.float64)
    angles = positions[:, None, None] * case.rope_theta**-exponents / case.rope_scale
    z = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), 2).to(getattr(torch, case.dtype))


def alibi_slope(head: int, num_heads: int) -> float:
    n = 2 ** math.floor(math.log2(num_heads))
    return 2 ** (-8 * (head + 1) / n) if head < n else 2 ** (-4 * (2 * (head - n) + 1) / n)


def visible(case: BatchCase, keep: torch.Tensor | None, qo_len: int, kv_len: int) -> torch.Tensor:
    """A mask replaces causality; a window restricts both."""
    causal = keep is None and (case.mask == "causal" or "decode" in case.kind)
    kept = seen(qo_len, kv_len, causal, case.window_left)
    return kept if keep is None else kept & keep


def formula(case: BatchCase, inputs: BatchInputs, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of a request, in the base of the case."""
    q, k, v = request.q.double(), request.k, request.v
    qo_len, kv_len = len(q), len(k)
    q_rows, k_rows = rotated(case, q, kv_len - qo_len), rotated(case, k, 0)
    if inputs.head_scales:
        scale_q, scale_k, scale_v = (x.double()[:, None] for x in inputs.head_scales)
        q_rows, k_rows, v = q_rows * scale_q, k_rows * scale_k, v * scale_v
    slopes = [alibi_slope(head, case.num_qo_heads) for head in range(case.num_qo_heads)]
    distance = torch.arange(kv_len) - torch.arange(qo_len)[:, None]
    bias = torch.tensor(slopes).double()[:, None, None] * distance if case.pos_encoding_mode == "ALIBI" else 0.0
    kept = visible(case, request.keep, qo_len, kv_len)
    o, lse = attention(q_rows, k_rows, v, kept, case.scale, case.logits_soft_cap, inputs.sinks, bias)
    base = math.log(2) if case.lse_base == "ln" else 1.0
    return o * (1.0 if case.v_scale is None else case.v_scale), lse * base


def batch_formula(case: BatchCase, inputs: BatchInputs) -> tuple[torch.Tensor, torch.Tensor]:
    solved = [formula(case, inputs, request) for request in inputs.requests]
    before = torch.zeros(case.first, case.num_qo_heads, case.head_dim_vo).double()
    o, lse = zip((before, before[..., 0] - math.inf), *solved, strict=True)
    return torch.cat(o), torch.cat(lse)


def assert_batch_right(case: BatchCase, inputs: BatchInputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """The reference computes in fp32: only the output is rounded."""
    o_ref, lse_ref = batch_formula(case, inputs)
    if case.kind == "single_decode":
        o_ref, lse_ref = o_ref[0], lse_ref[0]
    assert out.dtype == getattr(torch, case.o_dtype or case.dtype)
    ulp = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), o_ref, rtol=ulp, atol=1e-4 * ulp + 1e-5)
    assert not out[lse_ref.isinf()].any()
    if case.return_lse:
        assert lse is not None
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), lse_ref, rtol=2e-6, atol=2e-5)
