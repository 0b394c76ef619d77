"""vLLM's KV cache of a layer: views of its keys and values with the engine's strides.

A layer has one tensor. Its logical shape is `[blocks, kv_heads, block_size, 2 * head_size]`, keys in the first half of
the last axis, values in the second; how it lies in memory (NHD, HND, blocks of several layers side by side) is in its
strides. NVFP4: `[blocks, 2 * kv_heads, block_size, head_size / 2 + head_size / 16]` of bytes, whose blocks contain
packed keys, their block scales, packed values and their block scales, one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_attn.errors import ArgumentError
from cute_attn.integrations.vllm.support import COPY, NVFP4, Layer, stored_as

Pair = tuple[torch.Tensor, torch.Tensor]
BLOCK = 16  # elements that share a scale in NVFP4


class CacheViews(NamedTuple):
    """Views of a cache. All but `rows` are `[blocks, kv_heads, block_size, n]`, which is HND by axes, whatever the
    strides; `rows` are keys and values as `[blocks, block_size, kv_heads, n]`.
    """

    pair: Pair
    rows: Pair
    block_scales: Pair | None = None  # of NVFP4: float8_e4m3fn, n = head_size / 16

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.pair[0].shape[2]


def views(cache: torch.Tensor, layer: Layer) -> CacheViews:
    """Return views of a layer's cache; nothing is copied. Raises ArgumentError for a shape of another packing."""
    stored = stored_as(layer.kv_cache_dtype)
    if stored == NVFP4:
        return _nvfp4_views(cache, layer)
    expected = (layer.num_kv_heads, 2 * layer.head_size)
    if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != expected:
        raise ArgumentError(
            f"kv_cache must have shape [blocks, {expected[0]}, block_size, {expected[1]}], got {tuple(cache.shape)}"
        )
    if stored != COPY and cache.dtype == torch.uint8:
        cache = cache.view(getattr(torch, stored))
    k, v = cache[..., : layer.head_size], cache[..., layer.head_size :]
    return CacheViews((k, v), (k.transpose(1, 2), v.transpose(1, 2)))


def _nvfp4_views(cache: torch.Tensor, layer: Layer) -> CacheViews:
    data, scale = layer.head_size // 2, layer.head_size // BLOCK
    heads, width = layer.num_kv_heads, data + scale
    if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != (2 * heads, width):
        raise ArgumentError(
            f"an NVFP4 kv_cache must have shape [blocks, {2 * heads}, block_size, {width}], got {tuple(cache.shape)}"
        )
    blocks, _, block_size, _ = cache.shape
    inner = cache.stride()[1:]
    if inner == (block_size * width, width, 1):  # HND
        head_step, token_step = block_size, 1
    elif inner == (width, 2 * heads * width, 1):  # NHD
        head_step, token_step = 1, heads
    else:
        raise ArgumentError(f"blocks of an NVFP4 kv_cache must be dense, got strides {cache.stride()}")
    cells = heads * block_size

    def part(side: int, offset: int, n: int) -> torch.Tensor:
        start = cache.storage_offset() + side * cells * width + offset
        return cache.as_strided(
            (blocks, heads, block_size, n), (cache.stride(0), head_step * n, token_step * n, 1), start
        )

    k, v = part(0, 0, data), part(1, 0, data)
    k_sf, v_sf = (part(side, cells * data, scale).view(torch.float8_e4m3fn) for side in range(2))
    return CacheViews((k, v), (k.transpose(1, 2), v.transpose(1, 2)), (k_sf, v_sf))
