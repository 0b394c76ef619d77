"""Output parameters of a launch: addresses and strides of `out` and `lse`, and what is applied to final results."""

from __future__ import annotations

import torch

from cute_attn.problem import BatchProblem, Request, Settings

OUTPUT_FIELDS = ("o", "lse", "o_stride_n", "o_stride_h", "v_scale", "v_scale_ptr", "sinks")  # strides are bytes
Target = tuple[int, int, int, int, float, int, int]  # values of OUTPUT_FIELDS


class OutputTarget:
    """Computes the output parameters of launches with the same settings."""

    def __init__(self, settings: Settings) -> None:
        features = settings.features
        self.v_scale, self.itemsize = settings.v_scale, features.o_dtype.itemsize
        self.num_qo_heads, self.row_bytes = features.num_qo_heads, 4 * features.head_dim_vo  # of fp32 partials

    def of(self, problem: Request | BatchProblem) -> Target:
        """Returns the target of a launch that writes `out` and `lse` of a problem."""
        out, lse, sinks, v_scale = problem.out, problem.lse, problem.sinks, problem.v_scale_tensor
        strides = out.stride()
        return (
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            strides[0] * self.itemsize,
            strides[-2] * self.itemsize,
            self.v_scale,
            0 if v_scale is None else v_scale.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
        )

    def partials(self, workspace: torch.Tensor, rows: int) -> Target:
        """Returns the target of a launch that writes partials into `workspace`: o [num_splits, qo_len, num_qo_heads,
        head_dim_vo], then lse [num_splits, qo_len, num_qo_heads]. `rows`: num_splits * qo_len * num_qo_heads.
        """
        o, row_bytes = workspace.data_ptr(), self.row_bytes
        return o, o + rows * row_bytes, self.num_qo_heads * row_bytes, row_bytes, 1.0, 0, 0
