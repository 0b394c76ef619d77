"""Loaded mma.sync kernels, and their parameters from settings, tile and tensors."""

from __future__ import annotations

from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.host.features import batched
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import BLOCK_SCALE_FIELDS, STRIDE_FIELDS, OptionalBounds
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

ADDRESS_FIELDS = ("q", "k", "v", "o", "lse")
LENGTH_FIELDS = ("qo_len", "kv_len", "right", "left", "tiles_per_split")  # of a single request


class Fa2Kernel(PreparedKernel):
    """A loaded kernel for problems of the same settings. The `heads` that share a tile are those of a kv head."""

    def __init__(self, settings: Settings, spec: Fa2Spec, heads: int, combine: OptionalBounds | None, gpu: Gpu) -> None:
        features = settings.features
        batch = batched(features)
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
        groups = ADDRESS_FIELDS, STRIDE_FIELDS + BLOCK_SCALE_FIELDS, batch_fields(settings) if batch else LENGTH_FIELDS
        launch, unit = gpu.loaded(spec, settings.enable_pdl), scale_unit(spec.scores)
        super().__init__(settings, launch, static, groups, combine, unit)
