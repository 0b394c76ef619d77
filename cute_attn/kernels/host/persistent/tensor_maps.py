"""Tensor maps of persistent kernels, through which TMA reads q, k and v."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from cute_attn.kernels.blocks.smem_map import TileShape
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.host.params import kv_axes
from cute_attn.problem import Settings
from cute_attn.runtime import tensormap

MAX_LAYOUTS, MAX_ADDRESSES = 256, 256  # of tensors: layers share layouts, and allocators repeat addresses
OUTPUT_ROWS = 128  # packed rows that fa4 stores at a time

Encoder = Callable[..., bytes]
Map = Callable[[int], bytes]  # from an address to a tensor map


class TensorMaps:
    """Makes the maps of launches with the same settings and tile. `heads`: query heads whose rows share a tile."""

    def __init__(self, settings: Settings, tile: TileShape, heads: int) -> None:
        features = settings.features
        self.tile, self.heads, self.head_blocks = tile, heads, features.num_qo_heads // heads
        self.encoder: Encoder = emulated if features.device.type == "cpu" else tensormap.encode
        self.dtype, self.kv_dtype = (map_dtype(dtype) for dtype in (features.q_dtype, features.kv_dtype))
        self.itemsize, self.kv_itemsize = features.q_dtype.itemsize, features.kv_dtype.itemsize
        self.line_items = LINE // self.itemsize
        self.paged = features.kv_source == "paged"
        self.token, self.head = kv_axes(settings)
        self.box_rows = tile.k_box_rows  # of k
        if self.paged:
            self.box_rows = math.gcd(settings.page_size, tile.k_box_rows)

    def q(self, q: torch.Tensor) -> Map:
        """Returns the map [d, heads of a tile, tokens, blocks of heads] of q [tokens, heads, d], or [heads, d] of one
        token.
        """
        tokens, head = (1 if q.dim() == 2 else q.shape[0]), q.stride(-2) * self.itemsize
        token = 16 if q.dim() == 2 else q.stride(0) * self.itemsize
        return tensor_maps(
            self.encoder,
            self.dtype,
            (q.shape[-1], self.heads, tokens, self.head_blocks),
            (head, token, head * self.heads),
            (self.line_items, self.heads, self.tile.q_box_rows // self.heads, 1),
            tensormap.SWIZZLE_128B,
        )

    def o(self, out: torch.Tensor) -> Map:
        """Returns the map [d, heads of a tile, tokens, blocks of heads] of `out`, with boxes of OUTPUT_ROWS rows:
        whole tokens, or heads of one token.
        """
        tokens, head = (1 if out.dim() == 2 else out.shape[0]), out.stride(-2) * out.itemsize
        token = 16 if out.dim() == 2 else out.stride(0) * out.itemsize
        return tensor_maps(
            self.encoder,
            map_dtype(out.dtype),
            (out.shape[-1], self.heads, tokens, self.head_blocks),
            (head, token, head * self.heads),
            (LINE // out.itemsize, min(self.heads, OUTPUT_ROWS), max(OUTPUT_ROWS // self.heads, 1), 1),
            tensormap.SWIZZLE_128B,
        )

    def k(self, k: torch.Tensor) -> Map:
        return self.kv(k, self.box_rows)

    def v(self, v: torch.Tensor) -> Map:
        return self.kv(v, self.box_rows if self.paged else self.tile.cols)

    def kv(self, x: torch.Tensor, box_rows: int) -> Map:
        """Returns the map [d, tokens, heads, pages] of k or v."""
        shape, strides = x.shape, [stride * self.kv_itemsize for stride in x.stride()]
        columns, swizzle = 1, tensormap.SWIZZLE_128B
        if self.kv_itemsize < self.itemsize:  # rows to be converted
            columns, swizzle = -(-shape[-1] // self.line_items), tensormap.SWIZZLE_NONE
        pages, page = (shape[0], strides[0]) if self.paged else (1, 16)
        return tensor_maps(
            self.encoder,
            self.kv_dtype,
            (shape[-1], shape[self.token], shape[self.head], pages),
            (strides[self.token], strides[self.head], page),
            (columns * self.line_items, box_rows, 1, 1),
            swizzle,
        )

    def strides(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Returns the bytes from a page, a token and a head to the next."""
        strides, size = x.stride(), self.kv_itemsize
        return strides[0] * size, strides[self.token] * size, strides[self.head] * size


def map_dtype(dtype: torch.dtype) -> str:
    """Returns the element type of a tensor map: bytes for fp8."""
    return "uint8" if dtype.itemsize == 1 else str(dtype).removeprefix("torch.")


def emulated(*arguments: Any, swizzle: int) -> Any:
    """Encodes a map for the emulator, with the arguments of `tensormap.encode`."""
    from cute_attn.emulator.tensormap import encode_tiled

    return encode_tiled(*arguments, swizzle=swizzle, l2=tensormap.L2_PROMOTION_256B)


@functools.lru_cache(MAX_LAYOUTS)
def tensor_maps(
    encode: Encoder, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> Map:
    """Returns the maps of tensors of one layout, memoised by address. Strides of axes of one element are arbitrary, and
    a tensor without tokens is not read: both are replaced by values that the driver accepts.
    """
    strides = tuple(stride if size > 1 else 16 for stride, size in zip(strides, sizes[1:], strict=True))
    sizes = tuple(max(size, 1) for size in sizes)
    return functools.lru_cache(MAX_ADDRESSES)(
        lambda address: encode(dtype, address or 16, sizes, strides, box, swizzle=swizzle)
    )
