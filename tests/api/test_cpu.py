"""Single requests and batches on CPU tensors, against the formula in fp64; corrupted batches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support import batch_case, fp8_case, fuzz, matrix
from tests.support.batch_case import BatchCase, random_batch_case
from tests.support.case import poisoned_memory
from tests.support.formula import assert_batch_right, check
from tests.support.fp8_case import PLAIN, single
from tests.support.right import Solver

FP8 = (*fp8_case.SMALL, *fp8_case.VARIED, *fp8_case.CUT, *fp8_case.LONG)


def solved(problem: BatchCase) -> Solver:
    solver = Solver(problem)
    with poisoned_memory():
        out, lse = solver.call()
    assert_batch_right(problem, solver.inputs, out, lse)
    return solver


@pytest.mark.parametrize("problem", [*matrix.SMALL, *batch_case.SMALL, *FP8], ids=lambda problem: problem.id)
def test_small(problem: BatchCase) -> None:
    """The verdict that kernels get accepts the reference's results, too."""
    solved(problem).assert_right()


@pytest.mark.parametrize("seed", range(100))
def test_random_batch(seed: int) -> None:
    solved(random_batch_case(seed, max_len=90, max_batch=5))


@pytest.mark.parametrize("aligned", [False, True], ids=["cpu", "as on a GPU"])
def test_corrupted_input(aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if aligned:
        monkeypatch.setattr("cute_attn.request.operands.KERNEL_DEVICES", ("cpu",))
    outcomes = fuzz.run(600)
    assert outcomes.raised > 300
    assert outcomes.valid > 30
    assert set(outcomes.names) == {corruption.name for corruption in fuzz.CORRUPTIONS}


# ---- the bound on the error of fp8 attention


def test_the_bound_sees_a_lost_key() -> None:
    case = single(20, 40, **PLAIN)
    inputs = batch_case.make(case)
    k, v = inputs.kv
    results = batch_case.call(case, dataclasses.replace(inputs, kv=(k[1:], v[1:])))
    assert "off by" in check(case, inputs, *results)


def test_the_bound_sees_a_wrong_scale() -> None:
    case = single(20, 40, (4, 2))
    inputs = batch_case.make(case)
    scale_q, scale_k, scale_v = inputs.head_scales
    wrong = dataclasses.replace(inputs, head_scales=(scale_q, scale_k, scale_v.flip(0)))
    out, lse = batch_case.call(case, wrong)
    assert "off by" in check(case, inputs, out, lse)
    assert torch.isfinite(out).all()
