"""fp8 queries on CPU tensors: the reference stays well within the error bound that kernels must meet."""

from __future__ import annotations

import pytest
import torch

from tests.support import fp8_case
from tests.support.fp8_case import CUT, LONG, SMALL, VARIED, Fp8Case


@pytest.mark.parametrize("case", [*SMALL, *VARIED, *CUT, *LONG], ids=lambda case: case.id)
def test_reference(case: Fp8Case) -> None:
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
