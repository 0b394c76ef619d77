"""Loaded persistent kernels, and their parameters from settings, tile and tensors."""

from __future__ import annotations

import torch

from cute_attn.kernels.blocks.tiles import tile_rows
from cute_attn.kernels.host.combine import CombineKernel
from cute_attn.kernels.host.fastdiv import magic
from cute_attn.kernels.host.features import batched
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.load import load
from cute_attn.kernels.host.output import FinalOutput, PartialOutput
from cute_attn.kernels.host.params import (
    NO_BATCH,
    Fields,
    batch_fields,
    divisor,
    mask_bounds,
    rope_fields,
    score_fields,
)
from cute_attn.kernels.host.persistent import variant
from cute_attn.kernels.host.persistent.tensor_maps import TensorMaps
from cute_attn.kernels.host.prepared import Addresses, PreparedKernel
from cute_attn.problem import Settings
from cute_attn.runtime import counters
from cute_attn.runtime.param_block import Values

PAGE_FIELDS = ("k_page_stride", "k_stride_n", "k_stride_h", "v_page_stride", "v_stride_n", "v_stride_h")
BLOCK_SCALE_FIELDS = (  # of kernels for NVFP4 k and v
    *("k_scales_stride_page", "k_scales_stride_n", "k_scales_stride_h"),
    *("v_scales_stride_page", "v_scales_stride_n", "v_scales_stride_h"),
)
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
        self,
        kernels: variant.PersistentKernels[variant.T],
        settings: Settings,
        tile: variant.T,
        heads: int,
        combine: bool,
        gpu: Gpu,
    ) -> None:
        features = settings.features
        batch = batched(features)
        split = combine and not batch
        kernel = kernels.spec_of(settings, tile, split)
        launch = load(kernel, gpu.arch.name, gpu.device_index, gpu.pdl(settings))
        self.counters = counters.of_device(gpu.device_index)  # allocated now: the first run may be captured
        self.maps = TensorMaps(settings, tile, heads)
        self.paged, self.block_scales = features.kv_source == "paged", features.kv_block_scales
        self.output_map = any(param.name == OUTPUT_MAP for param in launch.artifact.params)
        head_blocks = features.num_qo_heads // heads
        static: Fields = {
            **mask_bounds(settings),
            "num_qo_heads": features.num_qo_heads,
            **divisor("group", heads),
            "tile_rows": tile_rows(tile.rows, heads),
            **divisor("kv_group", head_blocks // features.num_kv_heads),
            **score_fields(settings, variant.scores(features)),
            "lse_scale": settings.lse_scale,
            "head_blocks": head_blocks,
            **divisor("page_size", settings.page_size, stem="page"),
            "box_rows": self.maps.box_rows,
        }
        static |= dict.fromkeys(LENGTH_FIELDS, 0) if batch else NO_BATCH
        if variant.rotates(features):
            static |= rope_fields(settings)
        groups = (
            (*ADDRESS_FIELDS, OUTPUT_MAP) if self.output_map else ADDRESS_FIELDS,
            PAGE_FIELDS + BLOCK_SCALE_FIELDS if self.block_scales else PAGE_FIELDS,
            ORDER_FIELDS + (batch_fields(settings) if batch else LENGTH_FIELDS),
        )
        output = PartialOutput(settings) if split else FinalOutput(settings)
        super().__init__(launch, static, groups, output, CombineKernel(settings, heads, gpu) if combine else None)

    def strides(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, block_scales: Values
    ) -> Values:
        """Returns the values of PAGE_FIELDS and BLOCK_SCALE_FIELDS, then the output's."""
        pages = (*self.maps.strides(k), *self.maps.strides(v)) if self.paged else NO_PAGES
        return *pages, *(block_scales if self.block_scales else ()), *self.output.strides(out)

    def addresses(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Addresses:
        """Returns a function that computes tensor maps, addresses and counters."""
        q_map, k_map, v_map, counter = self.maps.q(q), self.maps.k(k), self.maps.v(v), self.counters.address
        if self.output_map:
            o_map = self.maps.o(out)

        def addresses(places: tuple[int, int, int, int, int, int]) -> Values:
            q, k, v, out, lse, stream = places
            values = q_map(q), k_map(k), v_map(v), out, lse, k, v, counter(stream)
            return (*values, o_map(out)) if self.output_map else values

        return addresses
