"""The single-request matrix on a GPU, through the public API."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import marks
from tests.gpu.guarded import Guarded
from tests.support.matrix import FULL, SMALL, Case, call, check, make, poisoned_memory, random_case

pytestmark = marks.SM80

RANDOM = 200  # `tests.gpu.bundle` covers as many by default


@pytest.mark.parametrize("seed", range(RANDOM))
def test_random(seed: int) -> None:
    case = random_case(seed)
    with poisoned_memory():
        out, lse = call(case, make(case, "cuda"), backend="fa2")
    result = check(case, out, lse)
    assert result.ok, f"{case.id}: {result.detail}"


@pytest.mark.parametrize("case", FULL, ids=lambda case: case.id)
def test_single(case: Case) -> None:
    """Right with NaN in every unwritten byte, and bitwise equal in a second call."""
    inputs = make(case, "cuda")
    with poisoned_memory():
        out, lse = call(case, inputs, backend="fa2")
    result = check(case, out, lse)
    assert result.ok, result.detail
    second, second_lse = call(case, inputs, backend="fa2")
    assert torch.equal(second, out)
    assert lse is None or (second_lse is not None and torch.equal(second_lse, lse))


@pytest.mark.parametrize("case", [case for case in SMALL if case.return_lse], ids=lambda case: case.id)
def test_single_writes_its_outputs_alone(case: Case) -> None:
    outputs = Guarded.of(case.qo_len, case.num_qo_heads, case.head_dim_vo, getattr(torch, case.o_dtype or case.dtype))
    single = case.kind == "decode"
    out, lse = (x[0] if single else x for x in (outputs.out, outputs.lse))
    returned = call(case, make(case, "cuda"), backend="fa2", out=out, lse=lse)
    assert returned[0].data_ptr() == out.data_ptr()
    result = check(case, out, lse)
    assert result.ok, result.detail
    outputs.assert_alone()
