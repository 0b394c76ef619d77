"""Attention over tensors without pages by its formula, in fp64: an oracle for wrappers that take their keys apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.executors import CUDA, GPU_MARKS, REFERENCE, emulated

# Every executor of the fixture, and the persistent kernels on the emulator.
EVERYWHERE = [
    pytest.param(REFERENCE, id=REFERENCE.name),
    pytest.param(emulated("sm_80"), id="emulator-sm_80", marks=pytest.mark.emulator),
    pytest.param(emulated("sm_90a", "fa3"), id="emulator-fa3", marks=pytest.mark.emulator),
    pytest.param(emulated("sm_100a", "fa4"), id="emulator-fa4", marks=pytest.mark.emulator),
    pytest.param(CUDA, id=CUDA.name, marks=GPU_MARKS),
]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    sm_scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o `[qo_len, heads, head_dim]` and the base-2 lse `[qo_len, heads]`, both fp64 on the CPU.

    `q`: `[qo_len, heads, head_dim]`; `k`, `v`: `[kv_len, kv_heads, head_dim]`; `keep`: bool `[qo_len, kv_len]`, or one
    per kv head `[kv_heads, qo_len, kv_len]`.
    """
    qs, ks, vs = (x.detach().cpu().double().numpy() for x in (q, k, v))
    qo_len, heads, head_dim = qs.shape
    kv_heads = ks.shape[1]
    kept = np.broadcast_to(keep.cpu().numpy(), (kv_heads, qo_len, len(ks)))
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    o, lse = np.zeros((qo_len, heads, vs.shape[2])), np.full((qo_len, heads), -math.inf)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        z = scale * qs[:, head] @ ks[:, kv_head].T
        if soft_cap > 0:
            z = soft_cap * np.tanh(z / soft_cap)
        weights = np.where(kept[kv_head], np.exp(z), 0.0)
        total = weights.sum(1) + (0.0 if sinks is None else math.exp(float(sinks[head])))
        some = total > 0
        o[some, head] = weights[some] @ vs[:, kv_head] / total[some, None]
        lse[some, head] = np.log2(total[some])
    return torch.from_numpy(o), torch.from_numpy(lse)


def assert_near(out: torch.Tensor, lse: torch.Tensor | None, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compare a result with the oracle's."""
    tolerance = 1e-2 if out.dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(out.cpu().double(), expected[0], rtol=tolerance, atol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse.cpu().double(), expected[1], rtol=1e-3, atol=2e-3)


def random(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
