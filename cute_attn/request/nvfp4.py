"""NVFP4 and fp8 numbers: rounding, decoding, and the checks of their scales and caches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from cute_attn.request import checks
from cute_attn.request.caches import cache_views
from cute_attn.request.settings import HALF

BLOCK = 16  # elements along the head dimension that share a scale
E2M1_MAX = 6.0
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
LARGEST_CODE = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
SMALLEST_AMAX = 1e-12  # of a tensor whose scale is computed from its values
INPUTS = (*HALF, torch.float32)

_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # of neighbouring e2m1 numbers

CACHE_NAMES = ("k of paged_kv_cache", "v of paged_kv_cache", "k of kv_cache_sf", "v of kv_cache_sf")

Pair = tuple[torch.Tensor, torch.Tensor]
Views = Callable[[str, Any, Any], Pair]


# ---- rounding


def quantize(x: torch.Tensor, scale: float | torch.Tensor) -> Pair:
    """Quantise x [..., D] to uint8 [..., D / 2] and block scales, uint8 [..., D / 16]."""
    blocks = x.double().unflatten(-1, (-1, BLOCK))
    magnitude = blocks.abs()
    scale_codes = nearest_fp8(magnitude.amax(-1), E2M1_MAX * scale, E4M3)
    step = (scale_codes.view(E4M3).double() * scale)[..., None]
    codes = torch.zeros(blocks.shape, dtype=torch.uint8, device=x.device)
    for code, midpoint in enumerate(_E2M1_MIDPOINTS):  # no search: NaN must become 0, as on a GPU
        bound = midpoint * step  # ties go to the even code
        codes += magnitude >= bound if code % 2 else magnitude > bound
    codes *= step > 0
    codes |= torch.signbit(blocks).to(torch.uint8) << 3
    low, high = codes.flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, scale_codes


def nearest_fp8(magnitude: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes of the fp8 numbers nearest to magnitude / scale, both fp64, >= 0. Ties go to the even code."""
    numbers = torch.arange(LARGEST_CODE[dtype] + 1, dtype=torch.uint8, device=magnitude.device).view(dtype).double()
    bounds = (numbers[1:] + numbers[:-1]) * 0.5 * scale
    below = torch.bucketize(magnitude, bounds)  # bounds less than the magnitude
    tie = torch.bucketize(magnitude, bounds, right=True) - below
    return (below + (tie & below)).to(torch.uint8)


def quantize_fp8(x: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantise x to fp8 of the same shape."""
    codes = nearest_fp8(x.double().abs(), scale, dtype)
    codes |= torch.signbit(x).to(torch.uint8) << 7
    return codes.view(dtype)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Decode e2m1 to fp64, without a table: CUDA graphs could not capture its copy to the device."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    quarters = torch.where(exponent == 0, mantissa << 1, (mantissa + 2) << exponent)
    return torch.where(codes >= 8, -0.25, 0.25).double() * quarters


# ---- checks


def cache_pairs(paged_kv_cache: Any, kv_cache_sf: Any, kv_layout: Any, views: Views = cache_views) -> tuple[Pair, Pair]:
    """Check caches and return views [num_pages, page_size, num_kv_heads, n]. `views` makes them, or refuses to."""
    caches = views("paged_kv_cache", paged_kv_cache, kv_layout)
    scales = views("kv_cache_sf", kv_cache_sf, kv_layout)
    for x, cache, scale in zip("kv", caches, scales, strict=True):
        checks.dtype(f"{x} of paged_kv_cache", cache.dtype, (torch.uint8,))
        if cache.shape[3] % (BLOCK // 2):
            raise checks.wrong(f"{x} of paged_kv_cache must have head_dim % {BLOCK} == 0", cache)
        expected = (*cache.shape[:3], cache.shape[3] * 2 // BLOCK)
        meaning = "the cache's with head_dim / 16 (as NHD)"
        checks.operand(f"{x} of kv_cache_sf", scale, (E4M3, torch.uint8), expected, meaning, cache.device, "device")
    return caches, (scales[0].view(torch.uint8), scales[1].view(torch.uint8))


def scale_of(name: str, value: Any, device: torch.device, read: bool = False) -> float | torch.Tensor:
    """Check a positive scale and return it as an fp32 number or a 0-d fp32 tensor on `device`.

    CPU tensors are numbers. Values of other tensors are read, which waits for the device, only if `read` says so.
    """
    if isinstance(value, torch.Tensor):
        if checks.stored(name, value).numel() != 1:
            raise checks.wrong(f"{name} must have one element", value)
        checks.check_grad(name, value)
        checks.dtype(name, value.dtype, (torch.float32,))
        if not value.is_cpu:
            checks.device(name, value, device, "device")
            if not read:
                return value.reshape(())
        value = value.item()
    number = ctypes.c_float(checks.positive(name, value)).value
    return checks.positive(name, number)  # not rounded to 0
