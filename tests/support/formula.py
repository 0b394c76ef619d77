"""Attention by its formula, in fp64, request by request, and verdicts on results."""

from __future__ import annotations

import dataclasses
import math

import torch

from tests.support.batch_case import E4M3, E5M2, BatchInputs, Request
from tests.support.case import BatchCase, verdict
from tests.support.dense_attention import attention, seen

CLOSE = 1152  # keys that may follow closely on the highest score
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-20, E4M3: 2**-4, E5M2: 2**-3}


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


def formula(
    case: BatchCase, request: Request, inputs: BatchInputs, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of a request, in the base of the case, computed on a device."""
    q, k, v = request.q.double(), request.k, request.v
    qo_len, kv_len = len(q), len(k)
    q_rows, k_rows = rotated(case, q, kv_len - qo_len), rotated(case, k, 0)
    if inputs.head_scales:
        scale_q, scale_k, scale_v = (x.double().cpu()[:, None] for x in inputs.head_scales)
        q_rows, k_rows, v = q_rows * scale_q, k_rows * scale_k, v * scale_v
    slopes = [alibi_slope(head, case.num_qo_heads) for head in range(case.num_qo_heads)]
    distance = torch.arange(kv_len) - torch.arange(qo_len)[:, None]
    bias = torch.tensor(slopes).double()[:, None, None] * distance if case.pos_encoding_mode == "ALIBI" else 0.0
    kept = visible(case, request.keep, qo_len, kv_len)
    options = case.scale, case.logits_soft_cap, inputs.sinks, bias
    o, lse = attention(q_rows, k_rows, v, kept, *options, device=device)
    base = math.log(2) if case.lse_base == "ln" else 1.0
    return o * (1.0 if case.v_scale is None else case.v_scale), lse * base


def batch_formula(
    case: BatchCase, inputs: BatchInputs, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of all rows; rows of no request are 0 and -inf."""
    before = torch.zeros(case.first, case.num_qo_heads, case.head_dim_vo, dtype=torch.float64, device=device)
    solved = [(before, before[..., 0] - math.inf), *(formula(case, r, inputs, device) for r in inputs.requests)]
    o, lse = (torch.cat(parts) for parts in zip(*solved, strict=True))
    return o, lse


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


# ---- the verdict on what kernels compute


def check(case: BatchCase, inputs: BatchInputs, out: torch.Tensor, lse: torch.Tensor | None) -> str:
    """Compare with the formula, on out's device, and return what is wrong, or "". Rows of no request must be 0 and
    -inf, and so must those that see no key.
    """
    if wrong_form := _wrong_form(case, out, lse):
        return wrong_form
    expected = batch_formula(case, inputs, out.device)
    found = out.view(expected[0].shape), None if lse is None else lse.view(expected[1].shape)
    if not case.fp8:
        return verdict(case, found, expected)
    for o, o_ref in zip(*(x[case.first :].double().split(case.qo_lens) for x in (found[0], expected[0])), strict=True):
        error, norm = float((o - o_ref).norm()), float(o_ref.norm())
        if out.dtype.itemsize > 1 and error > (2**-6 if case.v_mean >= 2 else 0.04) * norm:
            return f"o of a request, of norm {norm:.3g}, is off by {error:.3g}"
    return verdict(case, found, expected, _fp8_bound(case, inputs, expected[0]))


def _fp8_bound(case: BatchCase, inputs: BatchInputs, o: torch.Tensor) -> torch.Tensor:
    """Of the error of each element, whose right value is `o`, where q, k and v are in fp8.

    Probabilities are rounded to e4m3: by at most 1/16 of each, so o by at most 1/16 of what absolute values add up to.
    e4m3 runs out of exponents: a key is off by 2^-16 of what all add up to at most, one of those that follow closely on
    the highest score by 2^-13. Values of one sign average that out, and show how much tensor cores drop of sums in 14
    bits: `check` looks at norms, too. Scores are sums of fp8 products in the few bits that Hopper keeps, and so is the
    lse: of 1000 it was off by 1.7 on an H200.
    """
    absolute = [dataclasses.replace(request, v=request.v.abs()) for request in inputs.requests]
    size, _ = batch_formula(case, dataclasses.replace(inputs, requests=absolute), o.device)
    lost = torch.zeros_like(o)
    for rows, request in zip(lost[case.first :].split(case.qo_lens), absolute, strict=True):
        largest = request.v.sort(0, descending=True).values
        of_heads = (2**-13 * largest[:CLOSE].sum(0) + 2**-16 * largest.sum(0)) * abs(case.v_scale or 1.0)
        if inputs.head_scales:
            of_heads *= inputs.head_scales[2].cpu()[:, None].abs()
        rows += of_heads.repeat_interleave(case.num_qo_heads // case.num_kv_heads, 0).to(o.device)
    rounded, half_ulp = size.abs() / 16, ROUNDING[case.o_dtype or case.dtype]
    return (rounded + lost) * 1.02 + half_ulp * (o.abs() + rounded) + 1e-6


def _wrong_form(case: BatchCase, out: torch.Tensor, lse: torch.Tensor | None) -> str:
    rows = (case.num_qo_heads,) if case.kind == "single_decode" else (case.rows, case.num_qo_heads)
    expected = [("out", out, (*rows, case.head_dim_vo), getattr(torch, case.o_dtype or case.dtype))]
    if lse is not None:
        expected.append(("lse", lse, rows, torch.float32))
    wrong = [
        f"{name} is {x.dtype} {tuple(x.shape)}, not {dtype} {shape}"
        for name, x, shape, dtype in expected
        if tuple(x.shape) != shape or x.dtype != dtype
    ]
    return "; ".join(wrong + ["there is no lse"] * (case.single and case.return_lse and lse is None))
