"""Loaded persistent kernels, and their parameters from settings, tile and tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_attn.kernels.blocks.attention_spec import PersistentSpec
from cute_attn.kernels.blocks.smem_map import PersistentTile
from cute_attn.kernels.blocks.tiles import tile_rows
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.host.features import batched, rotates
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import BLOCK_SCALE_FIELDS, OptionalBounds
from cute_attn.kernels.host.params import (
    NO_BATCH,
    Fields,
    batch_fields,
    divisor,
    kv_axes,
    magic,
    mask_bounds,
    rope_fields,
    scale_unit,
)
from cute_attn.kernels.host.prepared import Addresses, Places, PreparedKernel, prepared
from cute_attn.problem import Settings, short
from cute_attn.runtime import counters, tensormap
from cute_attn.runtime.launch import Values

MAX_MAPS = 256  # of a layout: allocators repeat addresses
OUTPUT_ROWS = 128  # packed rows that fa4 stores at a time

Maps = Callable[[int, int], bytes]  # from a number of tokens and an address to a tensor map


class TensorMaps:
    """Makes the maps of launches with the same settings and tile. `heads`: query heads whose rows share a tile."""

    def __init__(self, settings: Settings, tile: PersistentTile, heads: int) -> None:
        features = settings.features
        self.tile, self.heads, self.head_blocks = tile, heads, features.num_qo_heads // heads
        self.encoder = emulated if features.device.type == "cpu" else tensormap.Encoder
        self.line_items = LINE // features.q_dtype.itemsize
        self.paged = features.kv_source == "paged"
        self.token, self.head = kv_axes(settings)
        self.box_rows, self.v_box_rows = tile.k_box_rows, tile.cols
        if self.paged:
            self.box_rows = self.v_box_rows = math.gcd(settings.page_size, tile.k_box_rows)

    def q(self, q: torch.Tensor) -> Maps:
        return self.rows(q, (self.line_items, self.heads, self.tile.q_box_rows // self.heads, 1))

    def o(self, out: torch.Tensor) -> Maps:
        """Returns the maps of `out`, with boxes of OUTPUT_ROWS rows: whole tokens, or heads of one token."""
        box = LINE // out.itemsize, min(self.heads, OUTPUT_ROWS), max(OUTPUT_ROWS // self.heads, 1), 1
        return self.rows(out, box)

    def rows(self, x: torch.Tensor, box: tuple[int, int, int, int]) -> Maps:
        """Returns the maps [d, heads of a tile, tokens, blocks of heads] of x [tokens, heads, d], or [heads, d] of one
        token.
        """
        head, token = x.stride(-2) * x.itemsize, 16 if x.dim() == 2 else x.stride(0) * x.itemsize
        sizes, strides = (x.shape[-1], self.heads, 0, self.head_blocks), (head, token, head * self.heads)
        return prepared(tensor_maps, self.encoder, map_dtype(x), sizes, strides, box, tensormap.SWIZZLE_128B, 2)

    def kv(self, x: torch.Tensor, box_rows: int) -> Maps:
        """Returns the maps [d, tokens, heads, pages] of k or v."""
        shape, strides = x.shape, [stride * x.itemsize for stride in x.stride()]
        columns, swizzle = 1, tensormap.SWIZZLE_128B
        if x.itemsize * self.line_items < LINE:  # rows to be converted
            columns, swizzle = -(-shape[-1] // self.line_items), tensormap.SWIZZLE_NONE
        pages, page = (shape[0], strides[0]) if self.paged else (1, 16)
        sizes, steps = (shape[-1], 0, shape[self.head], pages), (strides[self.token], strides[self.head], page)
        box = columns * self.line_items, box_rows, 1, 1
        return prepared(tensor_maps, self.encoder, map_dtype(x), sizes, steps, box, swizzle, 1)

    def strides(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Returns the bytes from a page, a token and a head to the next."""
        strides, size = x.stride(), x.itemsize
        return strides[0] * size, strides[self.token] * size, strides[self.head] * size


def map_dtype(x: torch.Tensor) -> str:
    """Returns the element type of a tensor's map: bytes for fp8."""
    return "uint8" if x.itemsize == 1 else short(x.dtype)


def emulated(
    dtype: str, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int, axis: int
) -> Maps:
    """Returns what encodes maps for the emulator, of the arguments of `tensormap.Encoder`."""
    from cute_attn.emulator.tensormap import TensorMap

    def encode(length: int, address: int) -> bytes:
        lengths = tuple((length or 1) if i == axis else max(size, 1) for i, size in enumerate(sizes))
        used = tuple(stride if size > 1 else 16 for stride, size in zip(strides, lengths[1:], strict=True))
        where = address or 16, dtype, lengths, used, tuple(box)
        return TensorMap(*where, swizzle, tensormap.L2_PROMOTION_256B).encode()

    return encode


def tensor_maps(encoder: Callable[..., Maps], *layout: Any) -> Maps:
    """Returns the maps of tensors of one layout, memoised. `layout`: arguments of `tensormap.Encoder`."""
    return functools.lru_cache(MAX_MAPS)(encoder(*layout))


PAGE_FIELDS = ("k_page_stride", "k_stride_n", "k_stride_h", "v_page_stride", "v_stride_n", "v_stride_h")
NO_PAGES: Values = (0,) * len(PAGE_FIELDS)
ADDRESS_FIELDS = ("q", "k", "v", "o", "lse", "k_address", "v_address", "counters")
OUTPUT_MAP = "o_map"  # of kernels that store outputs by TMA
ORDER_FIELDS = ("total_tiles", *divisor("section_tiles", 1), *divisor("section_heads", 1))  # of tiles
LENGTH_FIELDS = ("qo_len", "kv_len", "last_block", "split_tokens", *divisor("split_tiles", 1))  # of a single request


def order_values(total_tiles: int, section_tiles: int, section_heads: int) -> Values:
    """Returns the values of ORDER_FIELDS. `section_heads`: blocks of heads in an L2 section."""
    return total_tiles, section_tiles, *magic(section_tiles), section_heads, *magic(section_heads)


class PersistentKernel(PreparedKernel):
    """A loaded kernel of one tile for problems of the same settings. `heads`: query heads whose rows share a tile; they
    count as one head of partials.
    """

    def __init__(
        self, settings: Settings, spec: PersistentSpec, heads: int, combine: OptionalBounds | None, gpu: Gpu
    ) -> None:
        features, tile = settings.features, spec.tile
        self.batch, launch = batched(features), gpu.loaded(spec, settings.enable_pdl)
        self.counter = counters.of_device(gpu.device_index).address  # allocated now: the first run may be captured
        self.maps = TensorMaps(settings, tile, heads)
        self.block_scales = features.kv_block_scales
        self.output_map = any(param.name == OUTPUT_MAP for param in launch.artifact.params)
        head_blocks = features.num_qo_heads // heads
        static: Fields = {
            **mask_bounds(settings),
            "num_qo_heads": features.num_qo_heads,
            **divisor("group", heads),
            "tile_rows": tile_rows(tile.rows, heads),
            **divisor("kv_group", head_blocks // features.num_kv_heads),
            "soft_cap": settings.logits_soft_cap,
            "lse_scale": settings.lse_scale,
            "head_blocks": head_blocks,
            **divisor("page_size", settings.page_size),
            "box_rows": self.maps.box_rows,
        }
        static |= dict.fromkeys(LENGTH_FIELDS, 0) if self.batch else NO_BATCH
        if rotates(features):
            static |= rope_fields(settings)
        groups = (
            (*ADDRESS_FIELDS, OUTPUT_MAP) if self.output_map else ADDRESS_FIELDS,
            PAGE_FIELDS + BLOCK_SCALE_FIELDS if self.block_scales else PAGE_FIELDS,
            ORDER_FIELDS + (batch_fields(settings) if self.batch else LENGTH_FIELDS),
        )
        super().__init__(settings, launch, static, groups, combine, scale_unit(spec.scores))

    def read_strides(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_scales: Values) -> Values:
        """Returns the values of PAGE_FIELDS and BLOCK_SCALE_FIELDS."""
        pages = (*self.maps.strides(k), *self.maps.strides(v)) if self.maps.paged else NO_PAGES
        return *pages, *(block_scales if self.block_scales else ())

    def addresses(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Addresses:
        """Returns a function that computes tensor maps from addresses."""
        maps, rows = self.maps, 1 if q.dim() == 2 else q.shape[0]
        q_map, k_map, v_map = maps.q(q), maps.kv(k, maps.box_rows), maps.kv(v, maps.v_box_rows)
        tokens = k.shape[maps.token] if self.batch else 0  # of a single request as many as it has keys
        if self.output_map:
            o_map = maps.o(out)

        def addresses(places: Places) -> Values:
            q, k, v, out, lse, counters, _, kv_len = places
            kv_len = tokens or kv_len
            values = q_map(rows, q), k_map(kv_len, k), v_map(kv_len, v), out, lse, k, v, counters
            return (*values, o_map(rows, out)) if self.output_map else values

        return addresses
