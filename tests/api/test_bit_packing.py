"""`packbits` and `segment_packbits` against numpy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_attn.errors import ArgumentError, ArgumentTypeError, RuntimeArgumentError
from cute_attn.request.bit_packing import packbits, segment_packbits

BitOrder = Literal["big", "little"]
ORDERS = st.sampled_from(("big", "little"))


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=200), ORDERS)
def test_packbits_is_numpys(bits: list[bool], order: BitOrder) -> None:
    packed = packbits(torch.tensor(bits, dtype=torch.bool), order)
    assert packed.tolist() == np.packbits(np.array(bits, dtype=bool), bitorder=order).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float16, torch.float32])
def test_elements_count_where_they_are_not_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 2, 0, 0, 3, 0, 0, 0, 1])
    assert packbits(x.to(dtype)).tolist() == [0b01001000, 0b10000000]
    assert segment_packbits(x.to(dtype), torch.tensor([0, 9]))[0].tolist() == [0b01001000, 0b10000000]


def test_strided_input() -> None:
    x = torch.arange(40) % 3 == 0
    assert torch.equal(packbits(x[::2]), packbits(x[::2].contiguous()))


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=40), max_size=8), st.integers(0, 9), st.integers(0, 9), ORDERS)
def test_segments_are_packed_apart(segments: list[list[bool]], before: int, after: int, order: BitOrder) -> None:
    """`before` and `after`: elements of x that belong to no segment."""
    x = torch.tensor([True] * before + [*chain(*segments)] + [True] * after, dtype=torch.bool)
    sizes = np.array([len(segment) for segment in segments], dtype=np.int64)
    indptr = torch.from_numpy(before + np.concatenate(([0], np.cumsum(sizes))))
    packed, packed_indptr = segment_packbits(x, indptr.to(torch.int32), order)
    expected = [np.packbits(np.array(segment, dtype=bool), bitorder=order).tolist() for segment in segments]
    assert packed.tolist() == [*chain(*expected)]
    assert packed_indptr.tolist() == [0, *np.cumsum((sizes + 7) // 8).tolist()]
    assert (packed.dtype, packed_indptr.dtype) == (torch.uint8, torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_segment_indptr_dtypes(dtype: torch.dtype) -> None:
    packed, packed_indptr = segment_packbits(torch.ones(20), torch.tensor([0, 9, 9, 20], dtype=dtype), "little")
    assert packed.tolist() == [0xFF, 1, 0xFF, 0b111]
    assert packed_indptr.tolist() == [0, 2, 2, 4]


X, INDPTR = torch.ones(8), torch.tensor([0, 8])


@pytest.mark.parametrize(
    ("function", "arguments", "error", "name"),
    [
        (packbits, ([True, False],), ArgumentTypeError, "x"),
        (packbits, (torch.ones(2, 4),), ArgumentError, "x"),
        (packbits, (torch.tensor(1.0),), ArgumentError, "x"),
        (packbits, (X, "middle"), RuntimeArgumentError, "bitorder"),
        (packbits, (X, None), RuntimeArgumentError, "bitorder"),
        (packbits, (X, np.array(["big", "little"])), RuntimeArgumentError, "bitorder"),
        (segment_packbits, (torch.ones(2, 4), INDPTR), ArgumentError, "x"),
        (packbits, (X.to_sparse(),), ArgumentError, "x"),
        (segment_packbits, (X, INDPTR.to_sparse()), ArgumentError, "indptr"),
        (segment_packbits, (X, [0, 8]), ArgumentTypeError, "indptr"),
        (segment_packbits, (X, INDPTR[None]), ArgumentError, "indptr"),
        (segment_packbits, (X, INDPTR.float()), ArgumentError, "indptr"),
        (segment_packbits, (X, INDPTR.bool()), ArgumentError, "indptr"),
        (segment_packbits, (X, torch.tensor([], dtype=torch.int32)), ArgumentError, "indptr"),
        (segment_packbits, (X, torch.tensor([0, 5, 4, 8])), ArgumentError, "indptr"),
        (segment_packbits, (X, torch.tensor([9, 5, 8], dtype=torch.uint8)), ArgumentError, "indptr"),
        (segment_packbits, (X, torch.tensor([-1, 8])), ArgumentError, "indptr"),
        (segment_packbits, (X, torch.tensor([0, 9])), ArgumentError, "indptr"),
        (segment_packbits, (X, torch.zeros(2, dtype=torch.int32, device="meta")), RuntimeArgumentError, "indptr"),
        (segment_packbits, (X, INDPTR, "Little"), RuntimeArgumentError, "bitorder"),
    ],
)
def test_errors_name_the_argument(
    function: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=f"^{name} must"):
        function(*arguments)
