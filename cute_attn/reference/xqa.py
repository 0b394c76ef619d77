"""Decode over a paged cache in plain torch: what CPU tensors run, and what the kernel must agree with."""

from __future__ import annotations

import math

import torch

from cute_attn.problem import XqaProblem
from cute_attn.reference import attention as reference


def run(problem: XqaProblem, dtype: torch.dtype = torch.float32) -> None:
    """Solve `problem` into its `out` and `lse`, on its device."""
    f = problem.features
    lengths = problem.seq_lens.to(torch.int64).tolist()
    bounds = [i * f.q_len for i in range(len(lengths) + 1)]
    if problem.q_indptr is not None:
        bounds = problem.q_indptr.to(torch.int64).tolist()
    scale = problem.scale * math.prod(float(tensor) for tensor in problem.scale_tensors)
    v_scale = problem.v_scale * (1.0 if problem.v_scale_tensor is None else float(problem.v_scale_tensor))
    for i, kv_len in enumerate(lengths):
        rows = slice(bounds[i], bounds[i + 1])
        qo_len = rows.stop - rows.start
        kv_len = min(kv_len, problem.capacity)
        k, v = _keys(problem, i, kv_len)
        o, lse = reference.attention(
            problem.q[rows],
            k,
            v,
            logits=reference.Logits(scale),
            mask=reference.Mask(True, f.window_left, _keep(problem, rows, kv_len)),
            sinks=problem.sinks,
            v_scale=v_scale,
            compute_dtype=dtype,
        )
        problem.out[rows] = o.to(problem.out.dtype) if qo_len else o
        if problem.lse is not None:
            problem.lse[rows] = lse.to(torch.float32)


def _keys(problem: XqaProblem, request: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of one request, gathered from its pages: `[kv_len, num_kv_heads, head_dim]`."""
    num_pages = -(-kv_len // problem.features.page_size)
    pages = problem.page_table[request, :num_pages].long()
    gathered = [_rows(x, pages, kv_len) for x in (problem.k, problem.v)]
    if problem.block_scales is not None:
        scales = [_rows(x, pages, kv_len) for x in problem.block_scales]
        gathered = [reference.nvfp4_values(x, s) for x, s in zip(gathered, scales, strict=True)]
    k, v = gathered
    return k, v


def _rows(cache: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    bits = cache.view(torch.uint8) if cache.element_size() == 1 else cache  # torch indexes no fp8
    return bits[pages].flatten(0, 1)[:kv_len].view(cache.dtype)


def _keep(problem: XqaProblem, rows: slice, kv_len: int) -> torch.Tensor | None:
    """With mask bits: which tokens each row sees, before the window. Row r has bit j of draft token j."""
    if problem.mask is None:
        return None
    qo_len = rows.stop - rows.start
    prefix = kv_len - qo_len
    bits = problem.mask[rows].contiguous().view(torch.uint8)
    unpacked = (bits[..., None] >> torch.arange(8, device=bits.device, dtype=torch.uint8) & 1).flatten(1).bool()
    keep = torch.ones(qo_len, kv_len, dtype=torch.bool, device=bits.device)
    start = max(0, prefix)
    keep[:, start:] = unpacked[:, start - prefix : qo_len]
    return keep
