"""q of 16 bits over fp8 keys and values on a Hopper GPU: the matrices, and agreement with fa2."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu import marks
from tests.support import batch_case, case, fp8_kv_cases
from tests.support.batch_case import BatchCase, paged, ragged, random_batch_case
from tests.support.case import Case
from tests.support.matrix import BF16, CAUSAL, E4M3, FULL, HND, prefill
from tests.support.matrix import SMALL as SINGLE
from tests.support.right import assert_solved_again

pytestmark = list(marks.FA3_GPU)

RANDOM = 300
CHUNK = 20  # cases of one test
LARGE = (
    *fp8_kv_cases.batches(
        (
            paged((1, 700, 0, 33, 2048), (4000, 700, 12, 65, 5000), mask="causal", **batch_case.heads(32, 8)),
            paged((300,) * 20, (1500,) * 20, page_size=64, dtype="bfloat16", **batch_case.dims(256)),
            paged((513, 2), (4097, 3), page_size=1, dtype="bfloat16", **batch_case.heads(4, 4), **batch_case.dims(128)),
            ragged((1000, 1, 3000), (1000, 9000, 3000), mask="causal", dtype="bfloat16", **batch_case.dims(128)),
            ragged((513, 2), (4097, 3), **batch_case.heads(4, 4), **batch_case.dims(192, 128)),
        )
    ),
)


def random_cases(first: int) -> list[BatchCase]:
    """The prefills among so many seeds."""
    cases = [dataclasses.replace(random_batch_case(seed), kv_dtype=None) for seed in range(first, first + CHUNK)]
    return fp8_kv_cases.batches(cases)


@pytest.mark.parametrize("batch", [*fp8_kv_cases.batches(batch_case.SMALL), *LARGE], ids=lambda batch: batch.id)
def test_batch(batch: BatchCase) -> None:
    assert_solved_again(batch, "fa3")


@pytest.mark.parametrize("first", range(0, RANDOM, CHUNK))
def test_random(first: int) -> None:
    for batch in random_cases(first):
        assert_solved_again(batch, "fa3")


@pytest.mark.parametrize(
    "problem", [*fp8_kv_cases.singles(SINGLE), *fp8_kv_cases.singles(FULL[::4])], ids=lambda x: x.id
)
def test_single(problem: Case) -> None:
    assert_solved_again(problem, "fa3")


def test_as_fa2() -> None:
    problem = prefill(1000, 3000, (8, 2), 128, **BF16, **E4M3, **CAUSAL, **HND)
    inputs = case.make(problem, "cuda")
    (o2, lse2), (o3, lse3) = (case.call(problem, inputs, backend=backend) for backend in ("fa2", "fa3"))
    assert lse2 is not None
    torch.testing.assert_close(o3, o2, rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(lse3, lse2, rtol=1e-5, atol=1e-5)
