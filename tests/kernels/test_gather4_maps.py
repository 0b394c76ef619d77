"""Caches as matrices whose rows TMA gathers: the matrix finds every token where the tensor has it."""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_attn.kernels.host.persistent.gather4 import PageMatrix

PAGES, DIM, GAP = 3, 64, 8


def cache(layout: str, page_size: int, heads: int, gap: int, pages: int = PAGES, dim: int = DIM) -> torch.Tensor:
    """A cache with gaps of `gap` elements behind rows, and of a row behind heads, tokens and pages."""
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    more = int(gap > 0)
    numbers = torch.arange(pages * (inner[0] + more) * (inner[1] + more) * (dim + gap))
    whole = numbers.view(pages, inner[0] + more, inner[1] + more, dim + gap)
    return whole[:, : inner[0], : inner[1], :dim]


def axes(layout: str) -> tuple[int, int]:
    return (1, 2) if layout == "NHD" else (2, 1)


@pytest.mark.parametrize("gap", [0, GAP])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tokens_are_found(layout: str, page_size: int, heads: int, gap: int) -> None:
    x, (token, head) = cache(layout, page_size, heads, gap), axes(layout)
    matrix = PageMatrix.of(x, token, head)
    assert matrix is not None
    first, row_items = int(x[0, 0, 0, 0]), matrix.row_bytes // x.element_size()
    for page, slot, h in itertools.product(range(PAGES), range(page_size), range(heads)):
        row = page * matrix.page_rows + h * matrix.head_rows + slot
        column = h * matrix.head_columns
        assert row < matrix.rows
        assert column + DIM <= matrix.columns <= row_items
        stored = x[page, slot, h] if layout == "NHD" else x[page, h, slot]
        assert first + row * row_items + column == int(stored[0])


def test_lines_that_end_in_the_next_head() -> None:
    """A product reads 16 columns of K at a time, a box 64; nothing lies between adjacent heads."""
    assert PageMatrix.of(cache("NHD", 4, 2, 0, dim=72), *axes("NHD")) is None
    assert PageMatrix.of(cache("NHD", 4, 2, 0, dim=80), *axes("NHD")) is not None
    assert PageMatrix.of(cache("NHD", 4, 2, GAP, dim=80), *axes("NHD")) is None
    matrix = PageMatrix.of(cache("HND", 4, 2, 0, dim=72), *axes("HND"))
    assert matrix is not None
    assert matrix.columns == 72


def test_strides_of_single_elements_do_not_count() -> None:
    x = cache("NHD", 1, 1, 0, pages=1).as_strided((1, 1, 1, DIM), (7, 5, 3, 1))
    matrix = PageMatrix.of(x, *axes("NHD"))
    assert matrix is not None
    assert (matrix.columns, matrix.rows, matrix.head_columns) == (DIM, 1, 0)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 4, 1, 64), (4 * 64 + 8, 64, 64, 1)),  # pages that are no whole number of tokens apart
        ((3, 4, 2, 64), (8 * 64, 32, 256, 1)),  # rows that overlap
        ((1 << 24, 128, 2, 64), (2 * 128 * 64, 64, 128 * 64, 1)),  # more rows than coordinates
    ],
)
def test_caches_that_are_no_matrix(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert PageMatrix.of(torch.empty(1, device="meta").as_strided(shape, strides), 1, 2) is None
