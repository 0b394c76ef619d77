"""Parameters of a launch that say where it writes, and what it applies to final results."""

from __future__ import annotations

import torch

from cute_attn.kernels.host.params import Fields
from cute_attn.problem import Settings

STRIDE_FIELDS = ("o_stride_n", "o_stride_h")  # bytes
FINAL_ROLES = ("v_scale_ptr", "sinks")  # of `operands.ROLES`, those that final results alone need


class FinalOutput:
    """Writes `out` and `lse` of a problem."""

    stride_fields: tuple[str, ...] = STRIDE_FIELDS

    def __init__(self, settings: Settings) -> None:
        self.static: Fields = {"v_scale": settings.v_scale}
        self.itemsize = settings.features.o_dtype.itemsize

    def strides(self, out: torch.Tensor) -> tuple[int, ...]:
        """Returns the values of `stride_fields`."""
        strides = out.stride()
        return strides[0] * self.itemsize, strides[-2] * self.itemsize


class PartialOutput:
    """Writes fp32 partials of a single request: o [num_splits, qo_len, num_qo_heads, head_dim_vo], and
    lse [num_splits, qo_len, num_qo_heads].
    """

    stride_fields: tuple[str, ...] = ()

    def __init__(self, settings: Settings) -> None:
        row_bytes = 4 * settings.features.head_dim_vo
        strides = zip(STRIDE_FIELDS, (settings.features.num_qo_heads * row_bytes, row_bytes), strict=True)
        self.static: Fields = {"v_scale": 1.0, **dict(strides), **dict.fromkeys(FINAL_ROLES, 0)}

    def strides(self, out: torch.Tensor) -> tuple[int, ...]:
        """Returns nothing: all problems of the same settings have the same strides."""
        return ()


Output = FinalOutput | PartialOutput
