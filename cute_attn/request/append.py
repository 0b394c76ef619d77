"""Requests to write rows to paged caches: what to write, where, and how it is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_attn.request import nvfp4
from cute_attn.request.page_table import OwnRows, Slots, write_rows

Tensors = tuple[torch.Tensor, ...]
Scale = float | torch.Tensor  # an fp32 number, or one in a 0-d tensor on the caches' device

NO_SCALES = (1.0, 1.0)


class Append(NamedTuple):
    """Rows of keys and of values (or of one of them), and the caches that they are written to.

    All tensors are checked, and on one device.
    """

    rows: Tensors  # [nnz, num_heads, n]
    caches: Tensors  # [num_pages, page_size, num_heads, n], n / 2 for NVFP4
    slots: Slots
    stored: str = "copy"  # or "nvfp4", "float8_e4m3fn", "float8_e5m2"
    block_scales: Tensors = ()  # of NVFP4: uint8 [num_pages, page_size, num_heads, n / 16]
    scales: tuple[Scale, ...] = NO_SCALES


def reference(append: Append) -> None:
    """Writes the rows by torch operations, on any device. CUDA graphs can capture them."""
    write = _writer(append)
    for i, (rows, cache) in enumerate(zip(append.rows, append.caches, strict=True)):
        if append.stored == "copy":
            write(cache, rows)
        elif append.stored == "nvfp4":
            data, block_scales = nvfp4.quantize(rows, _wide(append.scales[i]))
            write(cache, data)
            write(append.block_scales[i], block_scales)
        else:
            write(cache, nvfp4.quantize_fp8(rows, _wide(append.scales[i]), cache.dtype))


def _writer(append: Append) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Returns what writes rows to their slots in a cache."""
    if isinstance(append.slots, OwnRows):
        return lambda cache, rows: cache.squeeze(1).copy_(rows)
    destinations = append.slots.destinations(append.rows[0].shape[0], append.caches[0])
    return lambda cache, rows: write_rows(cache, rows, destinations)


def own_rows(output: torch.Tensor) -> torch.Tensor:
    """Returns an output [rows, num_heads, n] as a cache with pages of one token, for slots of `OwnRows`."""
    return output.unsqueeze(1)


def _wide(scale: Scale) -> Scale:
    return scale.double() if isinstance(scale, torch.Tensor) else scale
