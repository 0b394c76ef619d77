"""Loaded persistent kernels, and their parameters from settings, tile and tensors."""

from __future__ import annotations

import functools

from cute_attn.kernels.host.batch import MAX_SETTINGS
from cute_attn.kernels.host.combine import CombineKernel
from cute_attn.kernels.host.fastdiv import magic
from cute_attn.kernels.host.features import batched
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.load import load
from cute_attn.kernels.host.output import OUTPUT_FIELDS, OutputTarget, Target
from cute_attn.kernels.host.params import (
    ADDRESS_FIELDS,
    NO_BATCH,
    Fields,
    ParamPacker,
    Values,
    batch_fields,
    block_scale_values,
    divisor,
    mask_bounds,
    mask_fields,
    optional,
    rope_fields,
    score_fields,
    two_addresses,
)
from cute_attn.kernels.host.persistent import variant
from cute_attn.kernels.host.persistent.gather4 import Gather4Maps
from cute_attn.kernels.host.persistent.tensor_maps import TensorMaps
from cute_attn.kernels.host.prepared import Replay
from cute_attn.problem import BatchProblem, Problem, Settings
from cute_attn.runtime import counters

TENSOR_FIELDS = ("q", "k", "v", "k_address", "v_address", "scale0", "scale1", "counters")
ORDER_FIELDS = ("total_tiles", *divisor("section_tiles", 1), *divisor("section_heads", 1))  # of tiles
LENGTH_FIELDS = ("qo_len", "kv_len", "last_block", "split_tokens", *divisor("split_tiles", 1))  # of a single request
STRIDE_FIELDS = (  # of pages
    *("k_page_stride", "k_stride_n", "k_stride_h"),
    *("v_page_stride", "v_stride_n", "v_stride_h"),
)
HEAD_SCALE_FIELDS = ("scale_q", "scale_k", "scale_v")
BLOCK_SCALE_FIELDS = (  # of kernels for NVFP4 k and v
    *("k_scales", "k_scales_stride_page", "k_scales_stride_n", "k_scales_stride_h"),
    *("v_scales", "v_scales_stride_page", "v_scales_stride_n", "v_scales_stride_h"),
)
OUTPUT_MAP_FIELDS = ("o_map",)  # of kernels that store outputs by TMA
REPLAY_FIELDS = (*ADDRESS_FIELDS, "k_address", "v_address", "counters")


def order_values(total_tiles: int, section_tiles: int, section_heads: int) -> Values:
    """Returns the values of ORDER_FIELDS. `section_heads`: blocks of heads in an L2 section."""
    return total_tiles, section_tiles, *magic(section_tiles), section_heads, *magic(section_heads)


class PreparedKernel:
    """Loaded kernels of one tile for problems of the same settings. `heads`: query heads whose rows share a tile; they
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
        kernel = kernels.spec_of(settings, tile, combine and not batch)
        self.output = OutputTarget(settings)
        self.attention = load(kernel, gpu.arch.name, gpu.device_index, gpu.pdl(settings))
        self.combine = CombineKernel(settings, heads, gpu) if combine else None
        self.counters = counters.of_device(gpu.device_index)  # allocated now: the first run may be captured
        self.maps = (Gather4Maps if kernel.kv == "gather4" else TensorMaps)(settings, tile, heads)
        self.paged = features.kv_source == "paged"
        head_blocks = features.num_qo_heads // heads
        static: Fields = {
            **mask_bounds(settings),
            "num_qo_heads": features.num_qo_heads,
            **divisor("group", heads),
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
        extras, absent = optional(
            {**mask_fields(settings), STRIDE_FIELDS: self.paged, HEAD_SCALE_FIELDS: features.per_head_scales}
        )
        if features.kv_block_scales:
            extras += BLOCK_SCALE_FIELDS
        self.output_map = any(param.name in OUTPUT_MAP_FIELDS for param in self.attention.artifact.params)
        output_fields = OUTPUT_MAP_FIELDS if self.output_map else ()
        self.number_fields: tuple[str, ...] = ORDER_FIELDS + (batch_fields(settings) if batch else LENGTH_FIELDS)
        dynamic = (*TENSOR_FIELDS, OUTPUT_FIELDS, self.number_fields, (*extras, *output_fields))
        packer = ParamPacker.of(self.attention, static | absent, dynamic)
        self.pack = packer.values
        self.replay_fields: tuple[str, ...] = (*REPLAY_FIELDS, *output_fields)

    def values(self, problem: Problem | BatchProblem, target: Target, numbers: Values, stream: int) -> Values:
        """Returns the parameters of an attention launch. `numbers`: values of ORDER_FIELDS, then of LENGTH_FIELDS or
        `batch_fields`.
        """
        q, k, v, mask, scales = problem.q, problem.k, problem.v, problem.packed_mask, problem.scale_tensors
        maps, k_address, v_address = self.maps, k.data_ptr(), v.data_ptr()
        scale0, scale1 = two_addresses(scales) if scales else (0, 0)
        extras: Values = () if mask is None else (mask.data_ptr(), mask.numel())
        if self.paged:
            extras += maps.strides(k) + maps.strides(v)
        if problem.head_scales is not None:
            extras += tuple(x.data_ptr() for x in problem.head_scales)
        if problem.block_scales is not None:
            extras += block_scale_values(problem.block_scales, self.paged, maps.token, maps.head)
        if self.output_map:
            extras += (maps.o(problem.out)(problem.out.data_ptr()),)
        return self.pack(
            maps.q(q)(q.data_ptr()),
            maps.k(k)(k_address),
            maps.v(v)(v_address),
            k_address,
            v_address,
            scale0,
            scale1,
            self.counters.address(stream),
            target,
            numbers,
            extras,
        )

    def replay(self, problem: Problem | BatchProblem) -> Replay:
        """Returns a function that computes tensor maps, addresses and counters."""
        q_map, k_map, v_map = self.maps.q(problem.q), self.maps.k(problem.k), self.maps.v(problem.v)
        counter = self.counters.address
        if self.output_map:
            o_map = self.maps.o(problem.out)
            return lambda q, k, v, out, lse, stream: (
                *(q_map(q), k_map(k), v_map(v), out, lse, k, v, counter(stream), o_map(out)),
            )
        return lambda q, k, v, out, lse, stream: (q_map(q), k_map(k), v_map(v), out, lse, k, v, counter(stream))


prepared_kernel = functools.lru_cache(MAX_SETTINGS)(PreparedKernel)
