"""Where launches write, and host code of the combine kernel, which merges split-KV partials."""

from __future__ import annotations

import torch

from cute_attn.kernels.combine.spec import RowsOfWarps
from cute_attn.kernels.host.features import batched, combine_spec
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import OptionalBounds
from cute_attn.kernels.host.params import PARTIAL_FIELDS, Fields
from cute_attn.problem import Settings
from cute_attn.runtime.launch import Values

STRIDE_FIELDS = ("o_stride_n", "o_stride_h")  # bytes
FINAL_ROLES = ("v_scale_ptr", "sinks")  # of `operands.ROLES`, those that final results alone need
ROW_FIELDS = RowsOfWarps._fields[1:]
LENGTH_FIELDS = (*ROW_FIELDS, "qo_len", "num_splits")  # of a single request
MERGE_FIELDS = (*ROW_FIELDS, "merges", "rows_per_merge", "slot_rows")  # of a batch: records, and counts of rows
NO_LENGTHS: Fields = {"qo_len": 0, "num_splits": 0}
NO_MERGES: Fields = {"merges": 0, "rows_per_merge": 1, "slot_rows": 1}


def output_strides(out: torch.Tensor) -> Values:
    """Returns the values of STRIDE_FIELDS for an output."""
    strides, size = out.stride(), out.itemsize
    return strides[0] * size, strides[-2] * size


def combine_launches(settings: Settings, heads: int, gpu: Gpu) -> OptionalBounds:
    """Returns launches of the combine kernel: addresses of o, lse and partials move; a grid, the output's strides,
    values of LENGTH_FIELDS, or of MERGE_FIELDS for a batch, and the output's scale are settled for longer. `heads`:
    query heads whose rows share a tile of the partials.
    """
    features = settings.features
    numbers, absent = (MERGE_FIELDS, NO_LENGTHS) if batched(features) else (LENGTH_FIELDS, NO_MERGES)
    static = {
        "num_qo_heads": features.num_qo_heads,
        "num_kv_heads": features.num_qo_heads // heads,
        "group": heads,
        "lse_scale": settings.lse_scale,
        **absent,
    }
    groups = ("o", "lse", *PARTIAL_FIELDS), STRIDE_FIELDS, numbers, ("v_scale",)
    return OptionalBounds(gpu.loaded(combine_spec(features), settings.enable_pdl), static, groups)
