"""The single-request matrix on a GPU, through the public API."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import marks
from tests.gpu.guarded import Guarded
from tests.support.case import Case, call, make
from tests.support.matrix import FULL, SMALL, random_case
from tests.support.right import assert_right, assert_solved_again

pytestmark = marks.SM80

RANDOM = 200  # `tests.gpu.bundle` covers as many by default


@pytest.mark.parametrize("seed", range(RANDOM))
def test_random(seed: int) -> None:
    assert_solved_again(random_case(seed), "fa2")


@pytest.mark.parametrize("case", FULL, ids=lambda case: case.id)
def test_single(case: Case) -> None:
    assert_solved_again(case, "fa2")


@pytest.mark.parametrize("case", [case for case in SMALL if case.return_lse], ids=lambda case: case.id)
def test_single_writes_its_outputs_alone(case: Case) -> None:
    outputs = Guarded.of(case.qo_len, case.num_qo_heads, case.head_dim_vo, getattr(torch, case.o_dtype or case.dtype))
    single = case.kind == "decode"
    out, lse = (x[0] if single else x for x in (outputs.out, outputs.lse))
    inputs = make(case, "cuda")
    returned = call(case, inputs, backend="fa2", out=out, lse=lse)
    assert returned[0].data_ptr() == out.data_ptr()
    assert_right(case, inputs, out, lse)
    outputs.assert_alone()
