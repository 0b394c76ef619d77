"""Loaded mma.sync kernels, and their parameters from settings, tile and tensors."""

from __future__ import annotations

import functools

from cute_attn.kernels.fa2.host.variant import scores, spec
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host.batch import MAX_SETTINGS
from cute_attn.kernels.host.combine import CombineKernel
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
    kv_axes,
    mask_bounds,
    mask_fields,
    optional,
    rope_fields,
    score_fields,
    two_addresses,
)
from cute_attn.kernels.host.prepared import Replay
from cute_attn.problem import BatchProblem, Problem, Settings

TENSOR_FIELDS = (
    *("q", "k", "v", "scale0", "scale1"),
    *("q_stride_n", "q_stride_h", "k_stride_n", "k_stride_h", "v_stride_n", "v_stride_h"),
)
LENGTH_FIELDS = ("qo_len", "kv_len", "right", "left", "tiles_per_split")  # of a single request
PAGE_FIELDS = ("k_stride_page", "v_stride_page")
BLOCK_SCALE_FIELDS = (
    *("k_scales", "k_scales_stride_page", "k_scales_stride_n", "k_scales_stride_h"),
    *("v_scales", "v_scales_stride_page", "v_scales_stride_n", "v_scales_stride_h"),
)
HEAD_SCALE_FIELDS = ("scale_q", "scale_k", "scale_v")


class PreparedKernel:
    """Loaded kernels of one tile for problems of the same settings."""

    def __init__(self, settings: Settings, tile: Tile, combine: bool, gpu: Gpu) -> None:
        features = settings.features
        batch = batched(features)
        heads = features.num_qo_heads // features.num_kv_heads
        kernel = spec(features, tile, split=combine and not batch)
        self.output = OutputTarget(settings)
        self.attention = load(kernel, gpu.arch.name, gpu.device_index, gpu.pdl(settings))
        self.combine = CombineKernel(settings, heads, gpu) if combine else None
        self.paged = features.kv_source == "paged"
        self.token, self.head = kv_axes(settings)
        self.itemsize, self.kv_itemsize = features.q_dtype.itemsize, features.kv_dtype.itemsize
        static: Fields = {
            **divisor("group", heads),
            "num_qo_heads": features.num_qo_heads,
            **divisor("num_kv_heads", features.num_kv_heads, stem="kv_heads"),
            **divisor("page_size", settings.page_size, stem="page"),
            **score_fields(settings, scores(features)),
            **rope_fields(settings),
            "lse_scale": settings.lse_scale,
        }
        if batch:  # every item has lengths of its own
            static |= {**dict.fromkeys(LENGTH_FIELDS, 0), **mask_bounds(settings)}
        else:
            static |= NO_BATCH
        extras, absent = optional(
            {
                **mask_fields(settings),
                PAGE_FIELDS: self.paged,
                BLOCK_SCALE_FIELDS: features.kv_block_scales,
                HEAD_SCALE_FIELDS: features.per_head_scales,
            }
        )
        self.number_fields: tuple[str, ...] = batch_fields(settings) if batch else LENGTH_FIELDS
        dynamic = (*TENSOR_FIELDS, OUTPUT_FIELDS, self.number_fields, extras)
        packer = ParamPacker.of(self.attention, static | absent, dynamic)
        self.pack = packer.values
        self.replay_fields: tuple[str, ...] = ADDRESS_FIELDS

    def values(self, problem: Problem | BatchProblem, target: Target, numbers: Values, stream: int) -> Values:
        """Returns the parameters of an attention launch. `numbers`: values of LENGTH_FIELDS, or of `batch_fields`."""
        q, k, v, mask, scales = problem.q, problem.k, problem.v, problem.packed_mask, problem.scale_tensors
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        itemsize, kv_itemsize, token, head = self.itemsize, self.kv_itemsize, self.token, self.head
        scale0, scale1 = two_addresses(scales) if scales else (0, 0)
        extras: Values = () if mask is None else (mask.data_ptr(), mask.numel())
        if self.paged:
            extras += k_strides[0] * kv_itemsize, v_strides[0] * kv_itemsize
        if problem.block_scales is not None:
            extras += block_scale_values(problem.block_scales, self.paged, token, head)
        if problem.head_scales is not None:
            extras += tuple(x.data_ptr() for x in problem.head_scales)
        return self.pack(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            scale0,
            scale1,
            q_strides[0] * itemsize,
            q_strides[-2] * itemsize,
            k_strides[token] * kv_itemsize,
            k_strides[head] * kv_itemsize,
            v_strides[token] * kv_itemsize,
            v_strides[head] * kv_itemsize,
            target,
            numbers,
            extras,
        )

    def replay(self, problem: Problem | BatchProblem) -> Replay:
        """Returns a function that returns the addresses of tensors."""
        return lambda q, k, v, out, lse, stream: (q, k, v, out, lse)


@functools.lru_cache(MAX_SETTINGS)
def prepared_kernel(settings: Settings, tile: Tile, heads: int, combine: bool, gpu: Gpu) -> PreparedKernel:
    """Returns a memoised `PreparedKernel`. The `heads` that share a tile are always those of a kv head."""
    return PreparedKernel(settings, tile, combine, gpu)
