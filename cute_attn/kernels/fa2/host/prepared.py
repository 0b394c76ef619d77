"""Loaded mma.sync kernels, and their parameters from settings, tile and tensors."""

from __future__ import annotations

import torch

from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.host.combine import CombineKernel
from cute_attn.kernels.host.features import batched
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import BLOCK_SCALE_FIELDS, PlainStrides
from cute_attn.kernels.host.params import (
    NO_BATCH,
    Fields,
    batch_fields,
    divisor,
    mask_bounds,
    range_bounds,
    rope_fields,
    scale_unit,
)
from cute_attn.kernels.host.prepared import PreparedKernel
from cute_attn.problem import Settings
from cute_attn.runtime.launch import Values

STRIDE_FIELDS = (*PlainStrides.fields, *BLOCK_SCALE_FIELDS)
ADDRESS_FIELDS = ("q", "k", "v", "o", "lse")
LENGTH_FIELDS = ("qo_len", "kv_len", "right", "left", "tiles_per_split")  # of a single request


class Fa2Kernel(PreparedKernel):
    """A loaded kernel for problems of the same settings. The `heads` that share a tile are those of a kv head."""

    def __init__(self, settings: Settings, spec: Fa2Spec, heads: int, combine: CombineKernel | None, gpu: Gpu) -> None:
        features = settings.features
        batch = batched(features)
        self.plain_strides = PlainStrides(settings)
        static: Fields = {
            **divisor("group", heads),
            "num_qo_heads": features.num_qo_heads,
            **divisor("num_kv_heads", features.num_kv_heads),
            **divisor("page_size", settings.page_size),
            "soft_cap": settings.logits_soft_cap,
            **rope_fields(settings),
            "lse_scale": settings.lse_scale,
            **range_bounds(settings),
        }
        if batch:  # every item has lengths of its own
            static |= {**dict.fromkeys(LENGTH_FIELDS, 0), **mask_bounds(settings)}
        else:
            static |= {**NO_BATCH, "full_tiles": -1}
        groups = ADDRESS_FIELDS, STRIDE_FIELDS, batch_fields(settings) if batch else LENGTH_FIELDS
        launch, unit = gpu.loaded(spec, settings.enable_pdl), scale_unit(spec.scores)
        super().__init__(settings, launch, static, groups, combine, unit)

    def strides(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, block_scales: Values
    ) -> Values:
        """Returns the values of STRIDE_FIELDS, then the output's."""
        return *self.plain_strides(q, k, v), *block_scales, *self.output.strides(out)
