"""Where launches write, and host code of the combine kernel, which merges split-KV partials."""

from __future__ import annotations

import torch

from cute_attn.kernels.combine.spec import RowsOfWarps
from cute_attn.kernels.host.features import batched, combine_spec
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import OptionalBounds
from cute_attn.kernels.host.params import PARTIAL_FIELDS, Fields
from cute_attn.problem import Settings

STRIDE_FIELDS = ("o_stride_n", "o_stride_h")  # bytes
FINAL_ROLES = ("v_scale_ptr", "sinks")  # of `operands.ROLES`, those that final results alone need


class Output:
    """Writes `out` and `lse` of a problem, or fp32 partials of a single request: o [num_splits, qo_len, num_qo_heads,
    head_dim_vo], and lse [num_splits, qo_len, num_qo_heads], with the same strides for all problems of these settings.
    """

    def __init__(self, settings: Settings, partial: bool = False) -> None:
        features = settings.features
        self.itemsize = features.o_dtype.itemsize
        self.stride_fields = () if partial else STRIDE_FIELDS
        self.partial, self.static = partial, Fields()
        if partial:
            row_bytes = 4 * features.head_dim_vo
            strides = zip(STRIDE_FIELDS, (features.num_qo_heads * row_bytes, row_bytes), strict=True)
            self.static = {**dict(strides), **dict.fromkeys(FINAL_ROLES, 0)}

    def strides(self, out: torch.Tensor) -> tuple[int, ...]:
        """Returns the values of `stride_fields`."""
        strides = out.stride()
        return (strides[0] * self.itemsize, strides[-2] * self.itemsize) if self.stride_fields else ()

    def v_scale(self, settings: Settings) -> float:
        """Returns the factor of what is written."""
        return 1.0 if self.partial else settings.v_scale


ROW_FIELDS = RowsOfWarps._fields[1:]
LENGTH_FIELDS = (*ROW_FIELDS, "qo_len", "num_splits")  # of a single request
MERGE_FIELDS = (*ROW_FIELDS, "merges", "rows_per_merge", "slot_rows")  # of a batch: records, and counts of rows
NO_LENGTHS: Fields = {"qo_len": 0, "num_splits": 0}
NO_MERGES: Fields = {"merges": 0, "rows_per_merge": 1, "slot_rows": 1}


class CombineKernel:
    """Launches of the combine kernel: addresses of o, lse and partials move; a grid, the output's strides, values of
    LENGTH_FIELDS, or of MERGE_FIELDS for a batch, and the output's scales are settled for longer. `heads`: query heads
    whose rows share a tile of the partials.
    """

    def __init__(self, settings: Settings, heads: int, gpu: Gpu) -> None:
        features, self.output = settings.features, Output(settings)
        launch = gpu.loaded(combine_spec(features), settings.enable_pdl)
        numbers, absent = (MERGE_FIELDS, NO_LENGTHS) if batched(features) else (LENGTH_FIELDS, NO_MERGES)
        static = {
            "num_qo_heads": features.num_qo_heads,
            "num_kv_heads": features.num_qo_heads // heads,
            "group": heads,
            "lse_scale": settings.lse_scale,
            **self.output.static,
            **absent,
        }
        groups = ("o", "lse", *PARTIAL_FIELDS), self.output.stride_fields, numbers, ("v_scale",)
        self.launches = OptionalBounds(launch, static, groups)
