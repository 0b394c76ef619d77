"""Tensor maps of K and V whose rows TMA gathers: all pages as one matrix, whose rows are tokens of one or all heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_attn.errors import ArgumentError
from cute_attn.kernels.host.persistent.tensor_maps import Map, TensorMaps, tensor_maps
from cute_attn.runtime import tensormap

MAX_ROWS = 1 << 31  # row numbers are coordinates
LINE_ITEMS, PRODUCT_ITEMS = 64, 16  # columns of K that a box has, and that a product reads at a time


@dataclass(frozen=True)
class PageMatrix:
    """K or V as a matrix, rows `row_bytes` apart: rows from a page to the next, and columns (elements) and rows from a
    head to the next, of which one is 0.
    """

    columns: int
    rows: int
    row_bytes: int
    page_rows: int
    head_columns: int
    head_rows: int

    @classmethod
    def of(cls, x: torch.Tensor, token: int, head: int) -> PageMatrix | None:
        """Returns the matrix of k or v, whose axes of tokens and heads are `token` and `head`; None if it is none."""
        pages, page_size, heads, dims = x.shape[0], x.shape[token], x.shape[head], x.shape[-1]
        row = x.stride(token) if page_size > 1 else x.stride(0) if pages > 1 else heads * dims
        page = x.stride(0) if pages > 1 else row * page_size
        head_stride = x.stride(head) if heads > 1 else 0
        by_rows = row > 0 and head_stride % row == 0
        head_rows, head_columns = (head_stride // row, 0) if by_rows else (0, head_stride)
        columns = head_columns * (heads - 1) + dims
        # Where heads are columns, boxes end in the next head: it must follow at once, and no product may read it.
        ends_well = not head_columns or dims % (PRODUCT_ITEMS if head_columns == dims else LINE_ITEMS) == 0
        if row < columns or page % row or not ends_well:
            return None
        rows = (pages - 1) * (page // row) + (heads - 1) * head_rows + page_size
        if rows > MAX_ROWS:
            return None
        return cls(columns, rows, row * x.element_size(), page // row, head_columns, head_rows)


class Gather4Maps(TensorMaps):
    """Tensor maps of launches whose K and V are gathered by TMA."""

    def matrix(self, x: torch.Tensor) -> PageMatrix:
        matrix = PageMatrix.of(x, self.token, self.head)
        if matrix is None:
            raise ArgumentError(f"TMA cannot gather rows of a cache of shape {tuple(x.shape)} and strides {x.stride()}")
        return matrix

    def kv(self, x: torch.Tensor, box_rows: int) -> Map:
        """Returns the map [columns, rows] of k or v."""
        matrix = self.matrix(x)
        return tensor_maps(
            self.encoder,
            self.kv_dtype,
            (matrix.columns, matrix.rows),
            (matrix.row_bytes,),
            (self.line_items, 1),
            tensormap.SWIZZLE_128B,
        )

    def strides(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Returns the rows from a page to the next, and the columns and rows from a head to the next."""
        matrix = self.matrix(x)
        return matrix.page_rows, matrix.head_columns, matrix.head_rows
