"""Bit packing of boolean masks: `packbits` and `segment_packbits`."""

from __future__ import annotations

import numpy as np
import torch

from cute_attn.errors import ArgumentError, RuntimeArgumentError
from cute_attn.request import checks

_SHIFTS = {"big": (7, 6, 5, 4, 3, 2, 1, 0), "little": (0, 1, 2, 3, 4, 5, 6, 7)}


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack a 1-D tensor of booleans into bytes, like `numpy.packbits`.

    .. warning::
        Attention reads a `packed_custom_mask` in **"little"** bit order, while the default here is "big", as
        in numpy and FlashInfer. Write `packbits(mask.flatten(), bitorder="little")`: the other order has the
        same shape and dtype, cannot be detected, and masks the wrong keys.

    Parameters
    ----------
    x : `[n]`, any dtype; an element counts as 1 where it is not zero.
    bitorder : "big" puts element 8b into bit 7 of byte b, "little" into bit 0.

    Returns
    -------
    uint8 `[ceil(n / 8)]` on x's device; the bits after the last element are 0.

    Raises
    ------
    ArgumentTypeError (x is not a tensor), ArgumentError (x is not 1-D), RuntimeArgumentError (bitorder).
    """
    _check_vector("x", x)
    _check_bitorder(bitorder)
    return mask_bits(x.bool(), bitorder)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Pack each segment `x[indptr[i]:indptr[i + 1]]` into bytes, starting a new byte for each.

    .. warning::
        Attention reads packed masks in **"little"** bit order; the default here is "big". See `packbits`.

    Parameters
    ----------
    x, bitorder : as for `packbits`; bytes are those of a segment.
    indptr : `[num_segments + 1]` integers on x's device, not decreasing, within 0..n. Elements outside
        `indptr[0]:indptr[-1]` belong to no segment and are left out.

    Returns
    -------
    (packed, packed_indptr) on x's device: uint8 bytes, and int32 `[num_segments + 1]` byte offsets, the
    running sum of ceil(segment length / 8). The bits after a segment's last element are 0. The size of the
    output depends on indptr's values, so that a CUDA device is synchronised.

    Raises
    ------
    ArgumentTypeError (x or indptr is not a tensor), ArgumentError (their shapes, indptr's dtype or values),
    RuntimeArgumentError (x and indptr on different devices; bitorder).
    """
    _check_vector("x", x)
    _check_bitorder(bitorder)
    bounds = _segment_bounds(indptr, x)
    sizes = (bounds.diff() + 7) // 8
    packed_indptr = torch.zeros_like(bounds)
    torch.cumsum(sizes, 0, out=packed_indptr[1:])
    packed = pack_segments(x.bool(), bounds, packed_indptr, int(packed_indptr[-1]), bitorder)
    return packed, packed_indptr.to(torch.int32)


def mask_bits(mask: torch.Tensor, bitorder: str = "little") -> torch.Tensor:
    """Pack a bool mask of any shape, in the order in which attention reads it. Nothing is checked."""
    start = torch.arange(0, mask.numel(), 8, device=mask.device)
    return _pack(mask.reshape(-1), start, torch.full_like(start, mask.numel()), bitorder)


def pack_segments(
    x: torch.Tensor, bounds: torch.Tensor, packed_bounds: torch.Tensor, total: int, bitorder: str
) -> torch.Tensor:
    """Pack `x[bounds[i]:bounds[i + 1]]` into bytes `packed_bounds[i]:packed_bounds[i + 1]` of `total` bytes.

    x is bool and the bounds are int64. Nothing is checked, so that a CUDA device is not synchronised.
    """
    sizes = packed_bounds.diff()
    # start of output byte b: its segment's first element, plus 8 for each byte of the segment before b
    start = torch.repeat_interleave(bounds[:-1] - 8 * packed_bounds[:-1], sizes, output_size=total)
    start += 8 * torch.arange(total, device=x.device)
    stop = torch.repeat_interleave(bounds[1:], sizes, output_size=total)
    return _pack(x, start, stop, bitorder)


def _pack(x: torch.Tensor, start: torch.Tensor, stop: torch.Tensor, bitorder: str) -> torch.Tensor:
    """Pack `x[start[b]:min(start[b] + 8, stop[b])]` into byte b.

    One pass per bit position: the index tensors then have one entry per byte, not one per element.
    """
    packed = torch.zeros(start.numel(), dtype=torch.uint8, device=x.device)
    for offset, shift in enumerate(_SHIFTS[bitorder]):
        source = start + offset
        inside = source < stop
        packed |= (x[source.clamp_(max=x.numel() - 1)] & inside).to(torch.uint8) << shift
    return packed


def _check_vector(name: str, x: object) -> None:
    x = checks.tensor(name, x)
    if x.dim() != 1:
        raise ArgumentError(f"{name} must have 1 dimension, got shape {tuple(x.shape)}; flatten it first")


def _check_bitorder(bitorder: object) -> None:
    if not isinstance(bitorder, str) or bitorder not in ("big", "little"):
        raise RuntimeArgumentError(f"bitorder must be 'big' or 'little', got {bitorder!r}")


def _segment_bounds(indptr: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Check `indptr` and return it as int64."""
    _check_vector("indptr", indptr)
    if indptr.dtype.is_floating_point or indptr.dtype.is_complex or indptr.dtype == torch.bool:
        raise ArgumentError(f"indptr must be of an integer dtype, got {indptr.dtype}")
    if indptr.numel() == 0:
        raise ArgumentError("indptr must have num_segments + 1 elements, got none")
    if indptr.device != x.device:
        raise RuntimeArgumentError(f"indptr must be on x's device {x.device}, got {indptr.device}")
    checks.increasing("indptr", indptr.cpu().numpy().astype(np.int64), x.numel(), ", the elements of x")
    return indptr.to(torch.int64)
