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
ELEMENTS = st.sampled_from((torch.bool, torch.uint8, torch.int32, torch.float16, torch.float32))
INDICES = st.sampled_from((torch.uint8, torch.int32, torch.int64))


def strided(bits: list[bool], dtype: torch.dtype) -> torch.Tensor:
    """Elements that are not zero where a bit is set, with others between them."""
    return torch.stack((torch.tensor(bits, dtype=torch.bool) * 3, torch.ones(len(bits))), -1).to(dtype)[:, 0]


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=200), ORDERS, ELEMENTS)
def test_packbits_is_numpys(bits: list[bool], order: BitOrder, dtype: torch.dtype) -> None:
    packed = packbits(strided(bits, dtype), order)
    assert packed.tolist() == np.packbits(np.array(bits, dtype=bool), bitorder=order).tolist()


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=40), max_size=5), st.integers(0, 9), ORDERS, ELEMENTS, INDICES)
def test_segments_are_packed_apart(
    segments: list[list[bool]], around: int, order: BitOrder, dtype: torch.dtype, index: torch.dtype
) -> None:
    """`around`: elements of x before and after all segments, which belong to none."""
    x = strided([True] * around + [*chain(*segments)] + [True] * around, dtype)
    sizes = np.array([len(segment) for segment in segments], dtype=np.int64)
    indptr = torch.from_numpy(around + np.concatenate(([0], np.cumsum(sizes))))
    packed, packed_indptr = segment_packbits(x, indptr.to(index), order)
    expected = [np.packbits(np.array(segment, dtype=bool), bitorder=order).tolist() for segment in segments]
    assert packed.tolist() == [*chain(*expected)]
    assert packed_indptr.tolist() == [0, *np.cumsum((sizes + 7) // 8).tolist()]
    assert (packed.dtype, packed_indptr.dtype) == (torch.uint8, torch.int32)


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
