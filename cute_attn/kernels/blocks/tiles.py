"""Head dims of the tile tables of persistent kernels."""

from __future__ import annotations

FP8_HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
PAGE_ALIGNED = 64  # tiles of paged keys are multiples of it, so that pages of any power of two need few boxes


def tile_dims(head_dims: tuple[int, int], table: tuple[tuple[int, int], ...] = HEAD_DIMS) -> tuple[int, int]:
    """Returns the head dims whose tile these have: the smallest of the table that contain them. TMA fills columns past
    the end with zeros; products and stores take the problem's own head dims.
    """
    return next(dims for dims in table if head_dims[0] <= dims[0] and head_dims[1] <= dims[1])
