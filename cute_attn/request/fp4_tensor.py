"""FlashInfer's container of NVFP4 outputs."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.request import checks

SCALE_ROWS = 128  # rows of scales come in tiles of so many


class FP4Tensor:
    """NVFP4 numbers, two per byte, with their block scales. Attention here does not write them: functions that take one
    as `out` refuse it with a reason, so that code which can make one still imports and runs.

    Parameters
    ----------
    data : uint8 `[..., ceil(n / 2)]`.
    scale : float8_e4m3fn, its rows a multiple of 128.
    scale_start_index : row of `scale` that belongs to row 0 of `data`. Default 0.
    original_shape : shape before packing, `[..., n]`. Default None: not known.

    Raises
    ------
    ArgumentError (a ValueError: dtype, rows of `scale`, `scale_start_index` or `original_shape`), ArgumentTypeError.
    """

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        scale_start_index: int = 0,
        original_shape: tuple[int, ...] | None = None,
    ) -> None:
        checks.dtype("data", checks.tensor("data", data).dtype, (torch.uint8,))
        checks.dtype("scale", checks.tensor("scale", scale).dtype, (torch.float8_e4m3fn,))
        start, rows = checks.integer("scale_start_index", scale_start_index), scale.shape[0]
        if rows % SCALE_ROWS:
            raise checks.wrong(f"scale must have a multiple of {SCALE_ROWS} rows", scale)
        if not 0 <= start < rows or start + data.shape[0] > rows:
            raise ArgumentError(
                f"scale_start_index must be in 0..{rows - 1} and leave {data.shape[0]} rows of scale, got {start}"
            )
        packed = None if original_shape is None else (*original_shape[:-1], (original_shape[-1] + 1) // 2)
        if packed is not None and tuple(data.shape) != packed:
            raise checks.wrong(f"data must have shape {packed} for original_shape", data)
        self.data, self.scale = data, scale
        self.scale_start_index, self.original_shape = start, original_shape
        self.dtype: Any = "nvfp4"
