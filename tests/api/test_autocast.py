"""Results under an ambient `torch.autocast`, in which engines and training scripts may call, equal those without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cute_attn
from cute_attn.reference.attention import attention
from tests.support.executors import DEVICES


def data(*shape: int, seed: int, device: str) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(device)


def single(device: str) -> list[torch.Tensor]:
    """In fp32, which autocast would round."""
    q, k, v = (data(40, 4, 64, seed=i, device=device).half() for i in range(3))
    return list(attention(q, k, v, compute_dtype=torch.float32))


def merges(device: str) -> list[torch.Tensor]:
    v, s = data(40, 3, 4, 64, seed=0, device=device), data(40, 3, 4, seed=1, device=device)
    two = cute_attn.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    return [*cute_attn.merge_states(v, s), *two]


def quantised(device: str) -> list[torch.Tensor]:
    k, v = data(2, 3, 16, 4, 64, seed=0, device=device).half()
    (k4, v4), (k_sf, v_sf), k_scale, _ = cute_attn.nvfp4_quantize_paged_kv_cache(k, v, "NHD")
    (k8, v8), *_ = cute_attn.fp8_quantize_paged_kv_cache(k, v)
    restored = cute_attn.nvfp4_kv_dequantize(k4, k_sf, torch.tensor([k_scale], device=device))
    return [
        k4,
        v4,
        k_sf.view(torch.uint8),
        v_sf.view(torch.uint8),
        k8.view(torch.uint8),
        v8.view(torch.uint8),
        restored,
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [single, merges, quantised])
def test_autocast_changes_nothing(device: str, function: Callable[[str], list[torch.Tensor]]) -> None:
    expected = function(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = function(device)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
