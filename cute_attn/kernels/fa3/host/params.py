"""Parameters of the wgmma kernel: tensor maps, then numbers in the kernel's order."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_attn.kernels.fa2.host import params as fa2_params
from cute_attn.kernels.fa3.host import variant as fa3_variant
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.host import fastdiv
from cute_attn.kernels.host.params import UNBOUNDED, Target
from cute_attn.problem import BatchProblem, Problem, Settings
from cute_attn.runtime import tensormap

NO_GRID = (0,) * 7
NO_ITEMS = (0, 0, 0)
NO_STRIDES = (0,) * 6
NO_HEAD_SCALES = (0, 0, 0)
COUNTERS = 15  # place of their address among the values
FORMS, ADDRESSES = 256, 256  # of tensors: layers share forms, and allocators repeat addresses

Values = tuple[int | float | bytes, ...]
Encoder = Callable[..., bytes]
Map = Callable[[int], bytes]  # from an address to a tensor map


class Launched(NamedTuple):
    """Numbers of a launch beside those of its settings and tensors."""

    counters: int
    right: int
    left: int
    total_tiles: int
    section: tuple[int, int]  # tiles of a section, and blocks of heads in it
    grid: tuple[int, ...] = NO_GRID
    items: tuple[int, ...] = NO_ITEMS
    kv_indices: int = 0


class Parameters(fa2_params.Parameters):
    """Of launches with the same settings and tile. `heads`: query heads whose rows share a tile; together they count as
    one head of partials.
    """

    def __init__(self, settings: Settings, tile: HopperTile, heads: int) -> None:
        super().__init__(settings)
        features = settings.features
        self.tile = tile
        self.encoder = encoder(features.device.type)
        self.group, self.num_kv_heads = heads, features.num_qo_heads // heads
        kv_group = self.num_kv_heads // features.num_kv_heads
        self.head_numbers = features.num_qo_heads, *divided(heads), *divided(kv_group)
        self.dtype, self.kv_dtype = (map_dtype(dtype) for dtype in (features.q_dtype, features.kv_dtype))
        self.line_items = LINE // self.itemsize
        if self.itemsize == 1:
            unit = 1.0 if fa3_variant.scores(features) else fa2_params.LOG2E
            self.score_numbers = settings.sm_scale * unit, settings.logits_soft_cap  # a scale alone is softmax's
        self.box_rows = math.gcd(settings.page_size, tile.cols) if self.paged else tile.cols
        self.page_numbers = *divided(settings.page_size), self.box_rows

    def bounds(self) -> tuple[int, int]:
        """Right and left bound of the mask, relative to the end of the keys."""
        settings = self.settings
        left = -min(settings.window_left, UNBOUNDED) if settings.window_left >= 0 else -UNBOUNDED
        return 0 if settings.causal else UNBOUNDED - 1, left  # row + bound + 1 must fit 32 bits

    def values(self, problem: Problem | BatchProblem, target: Target, launched: Launched) -> Values:
        mask, scales = problem.packed_mask, problem.scale_tensors
        o, lse, o_stride_n, o_stride_h, v_scale, v_scale_ptr, sinks = target
        scale0, scale1 = fa2_params.two_addresses(scales) if scales else (0, 0)
        counters, right, left, total_tiles, section, grid, items, kv_indices = launched
        return (
            self.q_map(problem.q)(problem.q.data_ptr()),
            self.kv_map(problem.k)(problem.k.data_ptr()),
            self.kv_map(problem.v)(problem.v.data_ptr()),
            o,
            lse,
            problem.k.data_ptr(),
            problem.v.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            0 if mask is None else mask.numel(),
            scale0,
            scale1,
            v_scale_ptr,
            sinks,
            o_stride_n,
            o_stride_h,
            counters,
            right,
            left,
            total_tiles,
            *self.head_numbers,
            *self.score_numbers,
            v_scale,
            self.settings.lse_scale,
            *divided(section[0]),
            *divided(section[1]),
            *grid,
            *items,
            self.num_kv_heads,
            *self.page_numbers,
            kv_indices,
            *(self.strides(problem.k, problem.v) if self.paged else NO_STRIDES),
            *(NO_HEAD_SCALES if problem.head_scales is None else (x.data_ptr() for x in problem.head_scales)),
        )

    def strides(self, k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
        """Bytes from a page, a token and a head to the next, of k, then of v."""
        return tuple(x.stride(axis) * self.kv_itemsize for x in (k, v) for axis in (0, self.token, self.head))

    def q_map(self, q: torch.Tensor) -> Map:
        """[d, heads of a tile, tokens, blocks of heads] of q [tokens, heads, d], or [heads, d] of one token."""
        tokens, head = (1 if q.dim() == 2 else q.shape[0]), q.stride(-2) * self.itemsize
        token = 16 if q.dim() == 2 else q.stride(0) * self.itemsize
        return tensor_maps(
            self.encoder,
            self.dtype,
            (q.shape[-1], self.group, tokens, self.num_kv_heads),
            (head, token, head * self.group),
            (self.line_items, self.group, self.tile.rows // self.group, 1),
            tensormap.SWIZZLE_128B,
        )

    def kv_map(self, x: torch.Tensor) -> Map:
        """[d, tokens, heads, pages] of k or v."""
        shape, strides = x.shape, [stride * self.kv_itemsize for stride in x.stride()]
        columns, swizzle = 1, tensormap.SWIZZLE_128B
        if self.kv_itemsize < self.itemsize:  # rows to be widened
            columns, swizzle = -(-shape[-1] // self.line_items), tensormap.SWIZZLE_NONE
        pages, page = (shape[0], strides[0]) if self.paged else (1, 16)
        return tensor_maps(
            self.encoder,
            self.kv_dtype,
            (shape[-1], shape[self.token], shape[self.head], pages),
            (strides[self.token], strides[self.head], page),
            (columns * self.line_items, self.box_rows, 1, 1),
            swizzle,
        )


def map_dtype(dtype: torch.dtype) -> str:
    """To a tensor map, fp8 is bytes."""
    return "uint8" if dtype.itemsize == 1 else str(dtype).removeprefix("torch.")


def divided(value: int) -> tuple[int, int, int]:
    """A divisor with the numbers that divide by it."""
    return value, *fastdiv.magic(value)


@functools.cache
def encoder(device_type: str) -> Encoder:
    """The driver's, or the emulator's for tensors on the CPU."""
    if device_type == "cpu":
        from cute_attn.emulator.tensormap import encode_tiled

        return functools.partial(encode_tiled, l2=tensormap.L2_PROMOTION_256B)
    return tensormap.encode


@functools.lru_cache(FORMS)
def tensor_maps(
    encode: Encoder, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> Map:
    """Of tensors of one form, remembered by their addresses. The stride of an axis of one is nobody's business, and a
    tensor without tokens is not read."""
    strides = tuple(stride if size > 1 else 16 for stride, size in zip(strides, sizes[1:], strict=True))
    sizes = tuple(max(size, 1) for size in sizes)
    return functools.lru_cache(ADDRESSES)(
        lambda address: encode(dtype, address or 16, sizes, strides, box, swizzle=swizzle)
    )
