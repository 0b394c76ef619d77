"""Attention over tensors without pages by its formula, in fp64: an oracle for wrappers that take their keys apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from tests.support.executors import CUDA, GPU_MARKS, REFERENCE, emulated

# The fixture `executor` with the persistent kernels on the emulator.
EVERYWHERE = pytest.mark.parametrize(
    "executor",
    [
        pytest.param(REFERENCE, id=REFERENCE.name),
        pytest.param(emulated("sm_80"), id="emulator-sm_80", marks=pytest.mark.emulator),
        pytest.param(emulated("sm_90a", "fa3"), id="emulator-fa3", marks=pytest.mark.emulator),
        pytest.param(emulated("sm_100a", "fa4"), id="emulator-fa4", marks=pytest.mark.emulator),
        pytest.param(CUDA, id=CUDA.name, marks=GPU_MARKS),
    ],
    indirect=True,
)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def nvfp4_values(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers that NVFP4 rows mean, fp64 on the CPU."""
    codes = torch.stack((data.cpu() & 15, data.cpu() >> 4), -1).flatten(-2)
    return E2M1[codes.long()] * scales.cpu().double().repeat_interleave(16, -1)


def seen(rows: int, keys: int, causal: bool = True, window_left: int = -1) -> torch.Tensor:
    """Which keys each of the last `rows` tokens sees, bool `[rows, keys]`."""
    position, key = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
    kept = (key <= position) | torch.tensor(not causal)
    return kept & (key >= position - window_left) if window_left >= 0 else kept


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    sm_scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | float = 0.0,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o `[qo_len, heads, head_dim]` and the base-2 lse `[qo_len, heads]`, both fp64 on a device.

    `q`: `[qo_len, heads, head_dim]`; `k`, `v`: `[kv_len, kv_heads, head_dim]`; `keep`: bool `[qo_len, kv_len]`, or one
    per kv head `[kv_heads, qo_len, kv_len]`; `bias` of scores: `[heads, qo_len, kv_len]`. Rows that see nothing are 0.
    """
    q, k, v = (x.detach().to(device).double() for x in (q, k, v))
    group, kept = q.shape[1] // k.shape[1], keep.to(device).bool()
    scale, parts = q.shape[2] ** -0.5 if sm_scale is None else sm_scale, []
    for i in range(k.shape[1]):  # one by one: scores of all heads take much memory
        heads = slice(i * group, (i + 1) * group)
        z = torch.einsum("ihd,jd->hij", q[:, heads], k[:, i]) * scale
        z += bias[heads].to(device) if isinstance(bias, torch.Tensor) else bias
        if soft_cap > 0:
            z = soft_cap * torch.tanh(z / soft_cap)
        z.masked_fill_(~(kept[i] if kept.dim() == 3 else kept), -math.inf)
        more = torch.empty(group, 0) if sinks is None else sinks[heads].detach()[:, None]
        more = more.to(device).double()[:, None].expand(-1, len(q), -1)
        lse = torch.cat((z, more), -1).logsumexp(-1)
        weights = (z - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        parts.append((torch.einsum("hij,jd->ihd", weights, v[:, i]), lse.T / math.log(2)))
    o, lse = (torch.cat(of_heads, 1) for of_heads in zip(*parts, strict=True))
    return o, lse


def batch_attention(requests: Iterable[Sequence[Any]], *options: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for requests one after the other: q, k, v and `keep` of each."""
    nothing = torch.empty(0, dtype=torch.float64)
    solved = [(nothing, nothing), *(attention(*request, *options, **more) for request in requests)]
    o, lse = (torch.cat(parts) for parts in zip(*solved, strict=True))
    return o, lse


def decoded(
    q: torch.Tensor, cache: torch.Tensor, lengths: Sequence[int], indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for one token a request over `cache` `[pages, 2, page_size, kv_heads, head_dim]`, whose pages of all
    requests `indices` lists one after the other.
    """
    pages = [-(-n // cache.shape[2]) for n in lengths]
    keys = [
        cache[own.long()].transpose(0, 1).flatten(1, 2)[:, :n]
        for own, n in zip(indices[: sum(pages)].split(pages), lengths, strict=True)
    ]
    return batch_attention((row[None], *kv, torch.ones(1, kv.shape[1])) for row, kv in zip(q, keys, strict=True))


def assert_near(out: torch.Tensor, lse: torch.Tensor | None, expected: Sequence[torch.Tensor]) -> None:
    """Compare a result with the oracle's."""
    tolerance = 1e-2 if out.dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(out.cpu().double(), expected[0], rtol=tolerance, atol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse.cpu().double(), expected[1], rtol=1e-3, atol=2e-3)


def random(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
