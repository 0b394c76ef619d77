"""Checks that several functions share: tensors whose memory is not their values, and what messages show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import ArgumentError
from cute_attn.request import checks
from tests.support.batch_case import BatchCase, decode, make, paged, plan_arguments, ragged, wrapper

CASES = [paged((3, 1), (9, 5), page_size=4), ragged((3, 1), (9, 5)), decode((9, 5), page_size=4)]
IDS = ["paged", "ragged", "decode"]

UNSTORED = [
    (lambda x: torch._neg_view(x), r"must not be a negative view \(is_neg\(\)\): pass .*resolve_neg\(\)"),
    (lambda x: x.to_sparse(), r"must be a strided tensor, got layout torch\.sparse_coo"),
]


@pytest.mark.parametrize(("change", "message"), UNSTORED, ids=["negative", "sparse"])
def test_memory_must_hold_the_values(change: Any, message: str) -> None:
    x = torch.ones(4)
    with pytest.raises(ArgumentError, match=f"^x {message}"):
        checks.tensor("x", change(x))


def test_views_of_complex_numbers() -> None:
    z = torch.ones(4, dtype=torch.complex64)
    with pytest.raises(ArgumentError, match="conjugate view"):
        checks.tensor("x", z.conj())
    with pytest.raises(ArgumentError, match="negative view"):
        checks.tensor("x", z.conj().imag)
    assert checks.tensor("x", z.real).dtype == torch.float32


@pytest.mark.parametrize(("change", "message"), UNSTORED, ids=["negative", "sparse"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_arrays_of_a_plan(case: BatchCase, change: Any, message: str) -> None:
    inputs = make(case)
    arguments = plan_arguments(case, inputs)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(ArgumentError, match=f"^{name} {message}"):
                wrapper(case).plan(**{**arguments, name: change(value)})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (list(range(10**6)), "[0, 1, 2, 3, ...] (list)"),
        (tuple(range(10**6)), "(0, 1, 2, 3, ...) (tuple)"),
        ([torch.zeros(10**6)], "(list)"),
        ("x" * 10**6, "(str)"),
        (10**4000, "(int)"),
        (2.5, "2.5 (float)"),
        (None, "None (NoneType)"),
    ],
    ids=["list", "tuple", "list of tensors", "str", "int", "float", "None"],
)
def test_messages_are_bounded(value: object, text: str) -> None:
    assert checks.describe(value).endswith(text)
    assert len(checks.describe(value)) < 160
