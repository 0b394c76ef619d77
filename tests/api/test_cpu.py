"""Single requests and batches on CPU tensors, against the formula in fp64; corrupted batches."""

from __future__ import annotations

import pytest
import torch

from tests.support import batch_case, fp8_case, fuzz, matrix
from tests.support.batch_case import BatchCase, random_batch_case
from tests.support.case import poisoned_memory
from tests.support.formula import assert_batch_right
from tests.support.fp8_case import Fp8Case
from tests.support.right import Solver


def solved(problem: BatchCase) -> Solver:
    solver = Solver(problem)
    with poisoned_memory():
        out, lse = solver.call()
    assert_batch_right(problem, solver.inputs, out, lse)
    return solver


@pytest.mark.parametrize("problem", [*matrix.SMALL, *batch_case.SMALL], ids=lambda problem: problem.id)
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
    assert set(outcomes.of) == {corruption.name for corruption in fuzz.CORRUPTIONS}


# ---- fp8 queries: the reference stays well within the error bound that kernels must meet


FP8 = [*fp8_case.SMALL, *fp8_case.VARIED, *fp8_case.CUT, *fp8_case.LONG]


@pytest.mark.parametrize("case", FP8, ids=lambda case: case.id)
def test_fp8(case: Fp8Case) -> None:
    fp8_case.solve(case, "reference")


def test_the_bound_sees_a_lost_key() -> None:
    case = Fp8Case((20,), (40,), single=True, scales="none")
    inputs = fp8_case.make(case, "cpu")
    short = fp8_case.Inputs(inputs.q, inputs.k[1:], inputs.v[1:], inputs.scales, None, None)
    out, lse = fp8_case.call(case, short, "reference")
    with pytest.raises(AssertionError):
        fp8_case.check(case, inputs, out, lse)


def test_the_bound_sees_a_wrong_scale() -> None:
    case = Fp8Case((20,), (40,), (4, 2), single=True)
    inputs = fp8_case.make(case, "cpu")
    scale_q, scale_k, scale_v = inputs.scales
    wrong = fp8_case.Inputs(inputs.q, inputs.k, inputs.v, (scale_q, scale_k, scale_v.flip(0)), None, None)
    out, lse = fp8_case.call(case, wrong, "reference")
    with pytest.raises(AssertionError, match="off by"):
        fp8_case.check(case, inputs, out, lse)
    assert torch.isfinite(out).all()
