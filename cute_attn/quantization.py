"""Quantised key-value caches: NVFP4 and fp8.

NVFP4: two e2m1 numbers per byte, the even element in the low bits; one e4m3 scale per 16 neighbours along the head
dimension, stored linearly (`[..., head_dim / 16]`, in the order of the elements); and one global scale per tensor:

    value = e2m1 * block_scale * global_scale        e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

A block's scale is the e4m3 number nearest to max|x| / (6 * global_scale), its elements are the e2m1 numbers nearest to
x / (block_scale * global_scale); in a tie the even code wins, too large a number becomes the largest. Both decisions
are exact: they compare in fp64, which represents every product involved. Blocks whose scale rounds to 0 are 0.

fp8: value = fp8 * scale, rounded in the same way. Inputs must be finite. On a CUDA device one kernel launch
quantises a tensor; everything else is torch operations. Docstrings tell which functions CUDA graphs can capture.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.dispatch import append
from cute_attn.errors import ArgumentError, RuntimeArgumentError
from cute_attn.ops import declare, fakes, trace
from cute_attn.problem import short
from cute_attn.request import checks
from cute_attn.request.append import Append, OwnRows, Scale, integers
from cute_attn.request.bit_packing import packbits, segment_packbits
from cute_attn.request.nvfp4 import (
    BLOCK,
    CACHE_NAMES,
    E4M3,
    E4M3_MAX,
    INPUTS,
    SMALLEST_AMAX,
    Pair,
    cache_pairs,
    e2m1_values,
    scale_of,
)
from cute_attn.request.settings import FP8, KV_LAYOUTS

__all__ = [
    "fp8_quantize_paged_kv_cache",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize_paged_kv_cache",
    "packbits",
    "segment_packbits",
]


@declare.operator("nvfp4_quantize", fakes.nvfp4)
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
    if is_dynamo_compiling():
        return trace.operator("nvfp4_quantize")(locals())
    input = checks.tensor("input", input)
    if input.dim() != 2 or input.shape[1] % BLOCK:
        raise checks.wrong(f"input must have shape [M, K] with K % {BLOCK} == 0", input)
    checks.dtype("input", input.dtype, INPUTS)
    checks.check_grad("input", input)
    checks.tensor("global_scale", global_scale)
    return _quantised(input.unsqueeze(1), scale_of("global_scale", global_scale, input.device), input.shape[:-1])


@declare.operator("nvfp4_dequantize", fakes.dequantized)
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
    if is_dynamo_compiling():
        return trace.operator("nvfp4_dequantize")(locals())
    fp4_data = checks.tensor("fp4_data", fp4_data)
    checks.dtype("fp4_data", fp4_data.dtype, (torch.uint8,))
    if fp4_data.dim() < 1 or fp4_data.shape[-1] % (BLOCK // 2):
        raise checks.wrong(f"fp4_data must have shape [..., K / 2] with K % {BLOCK} == 0", fp4_data)
    of_scales = (E4M3, torch.uint8), (*fp4_data.shape[:-1], fp4_data.shape[-1] * 2 // BLOCK), "[..., K / 16]"
    scales = checks.operand("block_scales", block_scales, *of_scales, fp4_data.device, "device")
    checks.dtype("output_dtype", output_dtype, INPUTS)
    checks.tensor("global_scale", global_scale)
    scale = scale_of("global_scale", global_scale, fp4_data.device)
    return _dequantized(fp4_data, scales.view(E4M3), scale).to(output_dtype)


@declare.operator("nvfp4_dequantize_paged", mutates=("output_k", "output_v"))
def nvfp4_kv_dequantize_paged(
    paged_kv_cache: torch.Tensor | Pair,
    kv_cache_sf: torch.Tensor | Pair,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Dequantise the tokens of requests from a paged NVFP4 cache. Can be captured by CUDA graphs.

    Token t of request b is in slot `t % page_size` of page `block_tables[b, t // page_size]`, and goes to
    `output_k[b, t]` and `output_v[b, t]`, rounded as by `nvfp4_kv_dequantize`. Past the last token of a request, and
    where a token has no page of the cache, the outputs keep what they hold.

    Parameters
    ----------
    paged_kv_cache : uint8 caches (k, v) of `[num_pages, page_size, num_kv_heads, head_dim / 2]` (NHD) or `[num_pages,
        num_kv_heads, page_size, head_dim / 2]` (HND), or both in one 5-D tensor `[num_pages, 2, ...]`.
    kv_cache_sf : e4m3, or uint8 with the bits of e4m3: the same with head_dim / 16, linear for K and V.
    block_tables : integers `[batch_size, max_pages]`, page numbers; max_pages * page_size >= max_seq_len.
    seq_lens : integers `[batch_size]`, tokens of each request.
    k_scale, v_scale : global scales > 0: fp32, one element, on the caches' device or the CPU.
    output_k, output_v : `[batch_size, max_seq_len, num_kv_heads, head_dim]` fp16, bf16 or fp32, both the same; written.
    kv_layout : "NHD" or "HND", of the caches.

    Raises
    ------
    ArgumentTypeError (not a tensor), LayoutError (kv_layout), ArgumentError (shape, dtype, device; outputs that overlap
    themselves, each other or the caches; on the CPU also a scale <= 0 and lengths outside 0..max_seq_len).
    """
    if is_dynamo_compiling():
        trace.operator("nvfp4_dequantize_paged")(locals())
        return
    caches, block_scales = cache_pairs(paged_kv_cache, kv_cache_sf, kv_layout)
    device = caches[0].device
    outputs = checks.tensor("output_k", output_k), checks.tensor("output_v", output_v)
    first: tuple[int | None, ...] = (None, None)
    for name, output, cache in zip(("output_k", "output_v"), outputs, caches, strict=True):
        axes = "[batch_size, max_seq_len, num_kv_heads, head_dim]"
        checks.shape(name, output, (*first, cache.shape[2], 2 * cache.shape[3]), axes)
        first = output.shape[:2]
        checks.dtype(name, output.dtype, INPUTS)
        checks.dtype(name, output.dtype, (outputs[0].dtype,))
        checks.device(name, output, cache.device, "device")
        checks.dense(name, output)
    batch_size, max_seq_len = output_k.shape[:2]
    accepted = (torch.int32, torch.int64), (batch_size, None), "[batch_size, max_pages]"
    tables = checks.operand("block_tables", block_tables, *accepted, device, "device")
    (num_pages, page_size), max_pages = caches[0].shape[:2], tables.shape[1]
    if max_pages * page_size < max_seq_len:
        needed = f"max_pages * page_size must be >= {max_seq_len}, the outputs' max_seq_len"
        needed = f"block_tables column count insufficient: {needed}; the page_size is {page_size}"
        raise checks.wrong(needed, tables, RuntimeArgumentError)
    lens = integers("seq_lens", seq_lens, batch_size, device).long()
    if device.type == "cpu":
        checks.each_within("seq_lens", lens.numpy(), max_seq_len, ", the outputs' max_seq_len")
    of_k = scale_of("k_scale", checks.tensor("k_scale", k_scale), device)
    of_v = scale_of("v_scale", checks.tensor("v_scale", v_scale), device)
    given = (*zip(CACHE_NAMES, (*caches, *block_scales), strict=True), ("block_tables", tables), ("seq_lens", seq_lens))
    written = zip(("output_k", "output_v"), outputs, strict=True)
    checks.apart(written, (*given, ("k_scale", k_scale), ("v_scale", v_scale)))
    if not num_pages or not max_seq_len:
        return
    token = torch.arange(max_seq_len, device=device)
    entry, slot = token // page_size, token % page_size
    for request in range(batch_size):  # one at a time: the values take 8 bytes each before they are rounded
        page = tables[request, entry].long()
        found = (token < lens[request]) & (page >= 0) & (page < num_pages)
        where = torch.where(found, page, 0), slot
        for cache, sf, scale, output in zip(caches, block_scales, (of_k, of_v), outputs, strict=True):
            values = _dequantized(cache[where], sf[where].view(E4M3), scale).to(output.dtype)
            output[request] = torch.where(found[:, None, None], values, output[request])


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
            raise checks.wrong(f"{name}_cache must have head_dim % {BLOCK} == 0", cache)
        if sf is None:
            inverse = ctypes.c_float(E4M3_MAX / max(_amax(f"{name}_cache", cache), SMALLEST_AMAX)).value
        else:
            inverse = float(scale_of(f"{name}_global_sf", sf, cache.device, read=True))
        scale = ctypes.c_float(1.0 / inverse).value
        data, scales = _quantised(cache.flatten(1, 2), scale, cache.shape[:-1])
        quantised.append((data, scales.view(E4M3), scale))
    (k, k_sf, k_scale), (v, v_sf, v_scale) = quantised
    return (k, v), (k_sf, v_sf), k_scale, v_scale


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
    k_scale, v_scale : > 0, numbers or one-element fp32 tensors on the caches' device or the CPU. Default: max|x|
        divided by the largest number of `dtype`.

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
            number = float(scale_of(f"{name}_scale", scale, cache.device, read=True))
        output = torch.empty(cache.shape, dtype=dtype, device=cache.device)
        rows = cache.flatten(2)
        append.run(Append((rows,), (output.view(rows.shape).unsqueeze(1),), OwnRows(), short(dtype), scales=(number,)))
        quantised.append((output, number))
    (k, k_number), (v, v_number) = quantised
    return (k, v), k_number, v_number


# ---- arguments


def _paged(name: str, cache: Any) -> torch.Tensor:
    cache = checks.readable(name, cache)
    if cache.dim() != 4:
        raise checks.wrong(f"{name} must have 4 dimensions", cache)
    checks.dtype(name, cache.dtype, INPUTS)
    checks.check_grad(name, cache)
    return cache


def _quantised(rows: torch.Tensor, scale: Scale, shape: torch.Size) -> Pair:
    """Quantise rows [n, heads, K] to NVFP4 with the outer axes `shape`."""
    outer, size = rows.shape[:2], rows.shape[2]
    data = rows.new_empty((*outer, size // 2), dtype=torch.uint8)
    block_scales = rows.new_empty((*outer, size // BLOCK), dtype=torch.uint8)
    caches = (data.unsqueeze(1),), (block_scales.unsqueeze(1),)
    append.run(Append((rows,), caches[0], OwnRows(), "nvfp4", caches[1], (scale,)))
    return data.view(*shape, size // 2), block_scales.view(*shape, size // BLOCK)


def _amax(name: str, x: torch.Tensor) -> float:
    amax = float(x.abs().amax()) if x.numel() else 0.0
    if not math.isfinite(amax):
        raise ArgumentError(f"{name} without a scale must be finite, got a maximum of {amax}")
    return amax


def _dequantized(packed: torch.Tensor, block_scales: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Return the values of uint8 [..., K / 2] with e4m3 scales [..., K / 16], rounded to fp32 [..., K]."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    blocks = e2m1_values(codes).unflatten(-1, (-1, BLOCK)) * block_scales.double()[..., None]
    return (blocks * scale).flatten(-2).float()
