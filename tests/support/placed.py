"""Where the tensors of a single request lie in memory. Between and around their elements is poison."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_attn.request.bit_packing import packbits
from tests.support.case import BatchCase
from tests.support.paged_cache import blank

GUARD = 4096  # poisoned elements before and after every tensor


def placed(case: BatchCase, values: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """q, k, v and block scales, `[tokens, heads, width]` each, as `storage` has them."""
    views = []
    if case.storage == "packed_qkv":
        heads, width = [x.shape[1] for x in values], max(case.head_dim_qk, case.head_dim_vo)
        token = sum(heads) * width
        size = 2 * GUARD + max(len(x) for x in values) * token
        whole = blank((size,), values[0].dtype).to(device)
        places = [GUARD + sum(heads[:i]) * width for i in range(len(values))]
        views = [whole.as_strided(x.shape, (token, width, 1), at) for x, at in zip(values, places, strict=True)]
    else:
        for i, x in enumerate(values):
            strides, shift = _strides(case, x, i > 0)
            size = 2 * GUARD + shift + len(x) * strides[0] + x.shape[1] * strides[1]
            views.append(blank((size,), x.dtype).to(device).as_strided(x.shape, strides, GUARD + shift))
    for view, x in zip(views, values, strict=True):
        own = x.shape[1] if view.stride(1) else 1
        view[:, :own].copy_(x[:, :own])
    return views


def _strides(case: BatchCase, x: torch.Tensor, kv: bool) -> tuple[tuple[int, int, int], int]:
    """Strides, and elements before the first."""
    n, h, d = x.shape
    if case.storage == "expanded" and kv:
        return (d, 0, 1), 0
    gap, tail, shift = 0, 0, 0
    if case.storage == "padded":
        gap, tail = 16 // x.itemsize, 48 // x.itemsize
    elif case.storage == "odd" and not kv:
        gap, tail, shift = 1, 1, 1
    heads_first = kv and case.kv_layout == "HND"
    if heads_first != (case.storage == "transposed"):
        return (d + gap, n * (d + gap) + tail, 1), shift
    return (h * (d + gap) + tail, d + gap, 1), shift


def placed_mask(case: BatchCase, keep: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mask within a wider one. Bits that belong to no element are 1."""
    if case.mask == "custom":
        wide = torch.ones(len(keep), keep.shape[1] + 3, dtype=torch.bool)
        wide[:, :-3] = keep
        return {"custom_mask": wide[:, :-3]}
    packed = packbits(torch.nn.functional.pad(keep.flatten(), (0, -keep.numel() % 8), value=True), "little")
    first = GUARD + (case.storage == "odd")
    wide = torch.full((packed.numel() + 2 * GUARD,), 0xFF, dtype=torch.uint8)
    own = wide[first : first + packed.numel()]
    return {"packed_custom_mask": own.copy_(packed)}
