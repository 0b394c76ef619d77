"""Checks that several functions share: tensors whose memory is not their values, and what messages show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import ArgumentError
from cute_attn.request import checks
from tests.support.batch_case import BatchCase, call, decode, make, paged, plan_arguments, ragged, wrapper
from tests.support.right import planned

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
def test_operands_of_a_run(case: BatchCase, change: Any, message: str) -> None:
    made, inputs = planned(case)
    names = ("k of paged_kv_cache", "v of paged_kv_cache") if case.kind != "ragged" else ("k", "v")
    with pytest.raises(ArgumentError, match=f"^q {message}"):
        made.run(change(inputs.q), *inputs.kv)
    halves = inputs.kv if case.kind == "ragged" else inputs.kv[0]
    for i, name in enumerate(names):
        pair = tuple(change(x) if i == j else x for j, x in enumerate(halves))
        with pytest.raises(ArgumentError, match=f"^{name} {message}"):
            made.run(inputs.q, *(pair if case.kind == "ragged" else (pair,)))
    buffers = {
        "out": torch.empty(case.rows, 2, 64, dtype=torch.float16),
        "lse": torch.empty(case.rows, 2),
        "sinks": torch.ones(2),
    }
    for name, buffer in buffers.items():
        with pytest.raises(ArgumentError, match=f"^{name} {message}"):
            made.run(inputs.q, *inputs.kv, **{name: change(buffer)})


@pytest.mark.parametrize(("change", "message"), UNSTORED, ids=["negative", "sparse"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_arrays_of_a_plan(case: BatchCase, change: Any, message: str) -> None:
    inputs = make(case)
    arguments = plan_arguments(case, inputs)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(ArgumentError, match=f"^{name} {message}"):
                wrapper(case).plan(**{**arguments, name: change(value)})


def test_a_sparse_operand_after_equal_runs() -> None:
    case = CASES[1]
    made, inputs = planned(case)
    for _ in range(2):
        call(case, inputs, made)
        with pytest.raises(ArgumentError, match="q must be a strided tensor"):
            made.run(inputs.q.to_sparse(), *inputs.kv)


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
