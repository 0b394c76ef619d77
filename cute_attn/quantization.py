"""Quantised key-value caches: NVFP4 and fp8.

NVFP4: two e2m1 numbers per byte, the even element in the low bits; one e4m3 scale per 16 neighbours along the head
dimension, stored linearly (`[..., head_dim / 16]`, in the order of the elements); and one global scale per tensor:

    value = e2m1 * block_scale * global_scale        e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

A block's scale is the e4m3 number nearest to max|x| / (6 * global_scale), its elements are the e2m1 numbers nearest to
x / (block_scale * global_scale); in a tie the even code wins, too large a number becomes the largest. Both decisions
are exact: they compare in fp64, which represents every product involved. Blocks whose scale rounds to 0 are 0.

fp8: value = fp8 * scale, rounded in the same way. Inputs must be finite. Everything runs on any device in torch
operations; docstrings tell which functions CUDA graphs can capture.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from cute_attn import page
from cute_attn.errors import ArgumentError
from cute_attn.request import checks
from cute_attn.request.bit_packing import packbits, segment_packbits
from cute_attn.request.caches import cache_views
from cute_attn.request.settings import FP8, HALF, KV_LAYOUTS

__all__ = [
    "fp8_quantize_paged_kv_cache",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_quantize",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_paged_kv_cache",
    "packbits",
    "segment_packbits",
]

BLOCK = 16  # elements along the head dimension that share a scale
E2M1_MAX = 6.0
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
LARGEST_CODE = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
SMALLEST_AMAX = 1e-12  # of a tensor whose scale is computed from its values
INPUTS = (*HALF, torch.float32)

# Midpoints of neighbouring e2m1 numbers, and whether the midpoint goes up: to the even code.
_E2M1_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)

Pair = tuple[torch.Tensor, torch.Tensor]


def nvfp4_kv_quantize(input: torch.Tensor, global_scale: torch.Tensor) -> Pair:
    """Quantise to NVFP4 with linear block scales. Can be captured by CUDA graphs.

    Parameters
    ----------
    input : `[M, K]` fp16, bf16 or fp32, K a multiple of 16.
    global_scale : fp32, one element, on input's device; > 0. It is a factor of the result: `amax / (6 * 448)` uses
        the whole range.

    Returns
    -------
    (packed, block_scales) : uint8 `[M, K / 2]`, and uint8 `[M, K / 16]` with the bits of e4m3 numbers.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device; global_scale <= 0 on the CPU).
    """
    input = checks.tensor("input", input)
    if input.dim() != 2 or input.shape[1] % BLOCK:
        raise ArgumentError(f"input must have shape [M, K] with K % {BLOCK} == 0, got {checks.describe(input)}")
    checks.dtype("input", input.dtype, INPUTS)
    checks.tensor("global_scale", global_scale)
    return _quantize(input, _scale("global_scale", global_scale, input.device))


def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Dequantise NVFP4 data with linear block scales. Can be captured by CUDA graphs.

    A value is e2m1 * block_scale * global_scale, rounded once to fp32 and then to `output_dtype`.

    Parameters
    ----------
    fp4_data : uint8 `[..., K / 2]`, of any rank: rows, or a whole cache.
    block_scales : e4m3, or uint8 with the bits of e4m3, `[..., K / 16]`.
    global_scale : fp32, one element, on fp4_data's device; > 0.
    output_dtype : fp16, bf16 or fp32.

    Returns
    -------
    `[..., K]`.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device; global_scale <= 0 on the CPU).
    """
    fp4_data = checks.tensor("fp4_data", fp4_data)
    checks.dtype("fp4_data", fp4_data.dtype, (torch.uint8,))
    if fp4_data.dim() < 1 or fp4_data.shape[-1] % (BLOCK // 2):
        raise ArgumentError(
            f"fp4_data must have shape [..., K / 2] with K % {BLOCK} == 0, got {checks.describe(fp4_data)}"
        )
    scales = checks.tensor("block_scales", block_scales)
    checks.dtype("block_scales", scales.dtype, (E4M3, torch.uint8))
    expected = (*fp4_data.shape[:-1], fp4_data.shape[-1] * 2 // BLOCK)
    checks.shape("block_scales", scales, expected, "[..., K / 16]")
    _same_device("block_scales", scales, fp4_data.device)
    checks.dtype("output_dtype", output_dtype, INPUTS)
    checks.tensor("global_scale", global_scale)
    scale = _scale("global_scale", global_scale, fp4_data.device)
    codes = torch.stack((fp4_data & 15, fp4_data >> 4), -1).flatten(-2)
    blocks = _e2m1_values(codes).unflatten(-1, (-1, BLOCK)) * scales.view(E4M3).double()[..., None]
    return (blocks * scale).flatten(-2).float().to(output_dtype)


def nvfp4_quantize_paged_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: str = "HND",
    k_global_sf: torch.Tensor | None = None,
    v_global_sf: torch.Tensor | None = None,
) -> tuple[Pair, Pair, float, float]:
    """Quantise a paged cache to NVFP4, as this library's attention reads it.

    Unlike FlashInfer's function of this name, which permutes the scales of V for one of its kernels, both K's and V's
    block scales are linear; any page size and any head dimension that is a multiple of 16 are accepted.

    Parameters
    ----------
    k_cache, v_cache : `[num_pages, num_kv_heads, page_size, head_dim]` (HND) or `[num_pages, page_size, num_kv_heads,
        head_dim]` (NHD); fp16, bf16 or fp32. The layout stays; the result does not depend on it.
    kv_layout : "HND" or "NHD".
    k_global_sf, v_global_sf : fp32, one element: the *inverse* of the global scale. Default: 448 / max|x|.

    Returns
    -------
    ((k, v), (k_sf, v_sf), k_global_scale, v_global_scale) : uint8 `[..., head_dim / 2]`, e4m3 `[..., head_dim / 16]`,
    and floats: `1 / global_sf`, to be multiplied into k_scale and v_scale of attention. Waits for a CUDA device.

    Raises
    ------
    ArgumentTypeError (not a tensor), LayoutError (kv_layout), ArgumentError (shape, dtype, device, global_sf <= 0).
    """
    checks.choice("kv_layout", kv_layout, KV_LAYOUTS)
    quantised = []
    for name, cache, sf in (("k", k_cache, k_global_sf), ("v", v_cache, v_global_sf)):
        cache = _paged(f"{name}_cache", cache)
        if cache.shape[3] % BLOCK:
            raise ArgumentError(f"{name}_cache must have head_dim % {BLOCK} == 0, got {checks.describe(cache)}")
        if sf is None:
            inverse = ctypes.c_float(E4M3_MAX / max(_amax(f"{name}_cache", cache), SMALLEST_AMAX)).value
        else:
            inverse = float(_scale(f"{name}_global_sf", sf, cache.device))
            checks.positive(f"{name}_global_sf", inverse)
        scale = ctypes.c_float(1.0 / inverse).value
        data, scales = _quantize(cache, scale)
        quantised.append((data, scales.view(E4M3), scale))
    (k, k_sf, k_scale), (v, v_sf, v_scale) = quantised
    return (k, v), (k_sf, v_sf), k_scale, v_scale


def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | Pair,
    kv_cache_sf: torch.Tensor | Pair,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Quantise rows of keys and values to NVFP4 and write them to a paged cache. Can be captured by CUDA graphs.

    Parameters
    ----------
    append_key, append_value : `[nnz, num_kv_heads, head_dim]` fp16, bf16 or fp32, any strides.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, kv_layout : as for `append_paged_kv_cache`:
        integers `[nnz]`, `[nnz]`, page numbers, `[batch_size + 1]`, `[batch_size]`, and "NHD" (default) or "HND".
    paged_kv_cache : uint8 caches like those of `append_paged_kv_cache`, with head_dim / 2 on the last axis. Written.
    kv_cache_sf : e4m3, or uint8 with the bits of e4m3: the same with head_dim / 16, linear for K and V. Written.
    k_scale, v_scale : global scales > 0, numbers or one-element fp32 tensors on the device.

    Raises
    ------
    ArgumentTypeError (not a tensor), LayoutError (kv_layout), ArgumentError (shape, dtype, device, a scale <= 0; on the
    CPU also rows that have no page). On a CUDA device the values of index and scale tensors are not checked.
    """
    caches, scale_caches = _nvfp4_caches(paged_kv_cache, kv_cache_sf, kv_layout)
    _check_append(append_key, append_value, caches)
    table = page.PageTable(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    destinations = table.destinations(append_key.shape[0], caches[0])
    _append((append_key, append_value), caches, scale_caches, (k_scale, v_scale), destinations)


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor | Pair,
    kv_cache_sf: torch.Tensor | Pair,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Quantise rows to NVFP4 and write them to given slots of a paged cache. Can be captured by CUDA graphs.

    Parameters
    ----------
    slot_mapping : integers `[nnz]`: row t goes to offset `slot % page_size` of page `slot // page_size`; rows with
        negative slots are not written.
    append_key, append_value : `[nnz, num_kv_heads, head_dim]` fp16, bf16 or fp32, any strides; rows past nnz may follow
        and are not written.
    paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout : as for `nvfp4_quantize_append_paged_kv_cache`.

    Raises
    ------
    The errors of `nvfp4_quantize_append_paged_kv_cache`; on the CPU ArgumentError also for slots past the end of the
    cache.
    """
    caches, scale_caches = _nvfp4_caches(paged_kv_cache, kv_cache_sf, kv_layout)
    _check_append(append_key, append_value, caches)
    destinations = page.slot_destinations(slot_mapping, caches[0])
    nnz = slot_mapping.numel()
    if nnz > append_key.shape[0]:
        raise ArgumentError(f"append_key must have a row for each of {nnz} slots, got {checks.describe(append_key)}")
    _append((append_key[:nnz], append_value[:nnz]), caches, scale_caches, (k_scale, v_scale), destinations)


def fp8_quantize_paged_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    dtype: torch.dtype = E4M3,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> tuple[Pair, float, float]:
    """Quantise a paged cache of either layout to fp8: value = fp8 * scale.

    Parameters
    ----------
    k_cache, v_cache : 4-D, fp16, bf16 or fp32.
    dtype : torch.float8_e4m3fn or torch.float8_e5m2.
    k_scale, v_scale : > 0, numbers or one-element fp32 tensors on the caches' device. Default: max|x| divided by the
        largest number of `dtype`.

    Returns
    -------
    ((k, v), k_scale, v_scale) : caches in `dtype`, and floats for k_scale and v_scale of attention. Waits for a CUDA
    device.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device, a scale <= 0).
    """
    checks.dtype("dtype", dtype, FP8)
    quantised = []
    for name, cache, scale in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        cache = _paged(f"{name}_cache", cache)
        if scale is None:
            number = ctypes.c_float(max(_amax(f"{name}_cache", cache), SMALLEST_AMAX) / torch.finfo(dtype).max).value
        else:
            number = checks.positive(f"{name}_scale", float(_scale(f"{name}_scale", scale, cache.device)))
        codes = _nearest_fp8(cache.double().abs(), number, dtype)
        codes |= torch.signbit(cache).to(torch.uint8) << 7
        quantised.append((codes.view(dtype), number))
    (k, k_number), (v, v_number) = quantised
    return (k, v), k_number, v_number


# --- rounding --------------------------------------------------------------------------------------------------------


def _quantize(x: torch.Tensor, scale: float | torch.Tensor) -> Pair:
    """Quantise x [..., D] to uint8 [..., D / 2] and block scales, uint8 [..., D / 16]."""
    blocks = x.double().unflatten(-1, (-1, BLOCK))
    magnitude = blocks.abs()
    scale_codes = _nearest_fp8(magnitude.amax(-1), E2M1_MAX * scale, E4M3)
    step = (scale_codes.view(E4M3).double() * scale)[..., None]
    codes = torch.zeros(blocks.shape, dtype=torch.uint8, device=x.device)
    for midpoint, up in _E2M1_MIDPOINTS:
        bound = midpoint * step
        codes += magnitude >= bound if up else magnitude > bound
    codes *= step > 0
    codes |= torch.signbit(blocks).to(torch.uint8) << 3
    low, high = codes.flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, scale_codes


def _nearest_fp8(magnitude: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes of the fp8 numbers nearest to magnitude / scale, both fp64, >= 0. Ties go to the even code."""
    numbers = torch.arange(LARGEST_CODE[dtype] + 1, dtype=torch.uint8, device=magnitude.device).view(dtype).double()
    bounds = (numbers[1:] + numbers[:-1]) * 0.5 * scale
    below = torch.bucketize(magnitude, bounds)  # bounds less than the magnitude
    tie = torch.bucketize(magnitude, bounds, right=True) - below
    return (below + (tie & below)).to(torch.uint8)


def _e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Decode e2m1 to fp64, without a table: CUDA graphs could not capture its copy to the device."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    quarters = torch.where(exponent == 0, mantissa << 1, (mantissa + 2) << exponent)
    return torch.where(codes >= 8, -0.25, 0.25).double() * quarters


# --- arguments -------------------------------------------------------------------------------------------------------


def _append(
    rows: Pair, caches: Pair, scale_caches: Pair, scales: tuple[Any, Any], destinations: page.Destinations | None
) -> None:
    device = caches[0].device
    checked = [_scale(name, scale, device) for name, scale in zip(("k_scale", "v_scale"), scales, strict=True)]
    for values, cache, scale_cache, scale in zip(rows, caches, scale_caches, checked, strict=True):
        data, block_scales = _quantize(values, scale)
        page.write_rows(cache, data, destinations)
        page.write_rows(scale_cache, block_scales, destinations)


def _nvfp4_caches(paged_kv_cache: Any, kv_cache_sf: Any, kv_layout: Any) -> tuple[Pair, Pair]:
    """Check the caches and return views [num_pages, page_size, num_kv_heads, n]."""
    caches = cache_views("paged_kv_cache", paged_kv_cache, kv_layout)
    scales = cache_views("kv_cache_sf", kv_cache_sf, kv_layout)
    for i, (cache, scale) in enumerate(zip(caches, scales, strict=True)):
        checks.dtype(f"paged_kv_cache[{i}]", cache.dtype, (torch.uint8,))
        checks.dtype(f"kv_cache_sf[{i}]", scale.dtype, (E4M3, torch.uint8))
        if cache.shape[3] % (BLOCK // 2):
            raise ArgumentError(f"paged_kv_cache[{i}] must have head_dim % {BLOCK} == 0, got {checks.describe(cache)}")
        expected = (*cache.shape[:3], cache.shape[3] * 2 // BLOCK)
        checks.shape(f"kv_cache_sf[{i}]", scale, expected, "the cache's with head_dim / 16 (as NHD)")
        _same_device(f"kv_cache_sf[{i}]", scale, cache.device)
    return caches, (scales[0].view(torch.uint8), scales[1].view(torch.uint8))


def _check_append(append_key: Any, append_value: Any, caches: Pair) -> None:
    for name, rows, cache in (("append_key", append_key, caches[0]), ("append_value", append_value, caches[1])):
        page.check_rows(name, rows, cache, 2 * cache.shape[3], "paged_kv_cache")
        checks.dtype(name, rows.dtype, INPUTS)
    page.check_same_rows(append_key, append_value)


def _paged(name: str, cache: Any) -> torch.Tensor:
    cache = checks.tensor(name, cache)
    if cache.dim() != 4:
        raise ArgumentError(f"{name} must have 4 dimensions, got {checks.describe(cache)}")
    checks.dtype(name, cache.dtype, INPUTS)
    return cache


def _amax(name: str, x: torch.Tensor) -> float:
    amax = float(x.abs().amax()) if x.numel() else 0.0
    if not math.isfinite(amax):
        raise ArgumentError(f"{name} without a scale must be finite, got a maximum of {amax}")
    return amax


def _scale(name: str, value: Any, device: torch.device) -> float | torch.Tensor:
    """Check a scale and return it as an fp32 number or a 0-d fp64 tensor on `device`. CUDA values are not read."""
    if not isinstance(value, torch.Tensor):
        number = ctypes.c_float(checks.positive(name, value)).value
        return checks.positive(name, number)  # not rounded to 0
    if value.numel() != 1:
        raise ArgumentError(f"{name} must have one element, got {checks.describe(value)}")
    checks.dtype(name, value.dtype, (torch.float32,))
    _same_device(name, value, device)
    if device.type == "cpu":
        checks.positive(name, value.item())
    return value.reshape(()).double()


def _same_device(name: str, value: torch.Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ArgumentError(f"{name} must be on device {device}, got {checks.describe(value)}")
