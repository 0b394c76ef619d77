"""Multi-item scoring on a GPU, on every backend that has it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from cute_attn.runtime import arch as archs
from tests.gpu import marks
from tests.support import multi_item
from tests.support.batch_case import (
    E4M3,
    BatchCase,
    BatchInputs,
    call,
    dims,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    random_batch_case,
    refusals,
    wrapper,
)
from tests.support.graphs import assert_plans_in_a_row_do_not_race, assert_replays
from tests.support.matrix import BF16
from tests.support.right import assert_solved_again

pytestmark = marks.SM80

BACKENDS = ("fa2", "fa3", "fa4", "auto")
LARGE = (
    paged((4000, 0, 700, 33), (6000, 12, 700, 900), mask="items", longest_item=40, **BF16, **heads(32, 8), **dims(128)),
    paged((1500, 64), (9000, 3000), 1, mask="items", longest_item=200, **BF16, **heads(8, 2), **dims(128)),
    paged((900, 300), (4000, 300), 64, mask="items", window_left=700, longest_item=90, **heads(8, 8), **dims(256)),
    paged((900, 300), (4000, 300), 16, mask="items", kv_dtype=E4M3, longest_item=90, **heads(8, 2), **dims(128)),
    ragged((2000, 30), (3000, 8000), mask="items", longest_item=3000, sinks=True, **heads(8, 1), **dims(192, 128)),
    paged((20, 5), (60000, 9000), 16, mask="items", **BF16, **heads(8, 1), **dims(128)),
)


def skip_unless_taken(case: BatchCase, inputs: BatchInputs, backend: str) -> None:
    arch = archs.for_device(torch.cuda.current_device())
    candidates = ("fa4", "fa3", "fa2") if backend == "auto" else (backend,)
    if all(refusals(case, inputs, name, arch) for name in candidates):
        pytest.skip(f"{backend} does not run this here")


def assert_right(case: BatchCase, backend: str) -> None:
    skip_unless_taken(case, make(case, "cuda"), backend)
    assert_solved_again(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.id)
def test_large(case: BatchCase, backend: str) -> None:
    assert_right(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(60))
def test_random(seed: int, backend: str) -> None:
    rng = random.Random(seed)
    case = random_batch_case(seed, max_len=1200)
    if case.kind == "decode":
        pytest.skip("decode wrappers have no items")
    case = dataclasses.replace(case, mask="items", longest_item=rng.choice((1, 10, 60, 400)))
    if backend in ("fa3", "fa4"):
        case = dataclasses.replace(case, pos_encoding_mode="NONE")
    assert_right(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_as_a_custom_mask(backend: str) -> None:
    case = paged((700, 90), (2500, 800), mask="items", longest_item=30, **BF16, **heads(8, 2), **dims(128))
    inputs = make(case, "cuda")
    arguments: dict[str, Any] = plan_arguments(case, inputs)
    skip_unless_taken(case, inputs, backend)
    made = wrapper(case, "cuda", backend=backend)
    made.plan(**arguments)
    out, lse = call(case, inputs, made)
    names = multi_item.draw(case.qo_lens, case.kv_lens, 1, 0).arguments("cpu")
    plain = {name: value for name, value in arguments.items() if name not in names}
    keep = torch.cat([request.keep.flatten() for request in inputs.requests if request.keep is not None])
    made.plan(**plain, custom_mask=keep)
    expected, expected_lse = call(case, inputs, made)
    torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


GRAPHED = (
    paged((300, 20, 5, 64), (900,) * 4, mask="items", **heads(8, 2), **dims(128)),
    ragged((300, 20, 5), (900,) * 3, mask="items", longest_item=100, **heads(8, 2)),
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", GRAPHED, ids=lambda case: case.id)
def test_replays_with_other_items(case: BatchCase, backend: str) -> None:
    skip_unless_taken(case, make(case, "cuda"), backend)
    assert_replays(case, 30, backend=backend)


def test_plans_in_a_row_do_not_race() -> None:
    assert_plans_in_a_row_do_not_race(GRAPHED[0])
