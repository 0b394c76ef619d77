"""`lse_base` and `lse_layout` of a run, and `uniform_q_len` of a plan."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, ArgumentTypeError, LayoutError, RuntimeArgumentError
from tests.support.batch_case import BatchCase, heads, make, paged, ragged
from tests.support.right import planned
from tests.wrappers.kinds import IDS, KINDS, made_for, plan_case, run

LN2 = math.log(2)


@pytest.mark.parametrize("of_plan", ["log2", "ln"])
@pytest.mark.parametrize("case", KINDS[:2], ids=IDS[:2])
def test_base_and_layout(case: BatchCase, of_plan: str) -> None:
    case = dataclasses.replace(case, lse_base=of_plan)
    made, inputs = planned(case)
    out, lse = made.run(inputs.q, *inputs.kv, return_lse=True)
    in_log2 = lse if of_plan == "log2" else lse / LN2
    for base, factor in ((None, 1.0 if of_plan == "log2" else LN2), ("log2", 1.0), ("ln", LN2)):
        for layout in ("NH", "HN"):
            wanted = (in_log2 * factor).t() if layout == "HN" else in_log2 * factor
            form = {"lse_base": base, "lse_layout": layout, "return_lse": True}
            returned = made.run(inputs.q, *inputs.kv, **form)
            assert torch.equal(returned[0], out)
            torch.testing.assert_close(returned[1], wanted, rtol=1e-6, atol=0)
            assert returned[1].is_contiguous()
            buffer = torch.full_like(wanted, math.nan, memory_format=torch.contiguous_format)
            for return_lse in (True, False):
                result = made.run(inputs.q, *inputs.kv, **{**form, "return_lse": return_lse}, lse=buffer)
                assert not return_lse or result[1] is buffer
                torch.testing.assert_close(buffer, wanted, rtol=1e-6, atol=0)
                buffer.fill_(math.nan)
    assert torch.equal(made.run(inputs.q, *inputs.kv, lse_layout="HN"), out)
    assert torch.equal(made.run_return_lse(inputs.q, *inputs.kv)[1], lse)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lse_base": "e"}, LayoutError, "lse_base must be one of 'log2', 'ln'"),
    ({"lse": torch.empty(22, 4).t()}, ArgumentError, "lse must be contiguous"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=[row[2][:24] for row in WRONG])
@pytest.mark.parametrize("case", KINDS[:2], ids=IDS[:2])
def test_wrong_forms(case: BatchCase, wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    made, inputs = planned(case)
    for _ in range(2):
        with pytest.raises(error, match=message):
            made.run(inputs.q, *inputs.kv, **{"lse_layout": "HN", "return_lse": True, **wrong})


# ---- uniform_q_len


@pytest.mark.parametrize("kind", [paged, ragged], ids=IDS[:2])
def test_uniform_q_len(kind: Any) -> None:
    """With CUDA graphs captured launches are made for that many tokens per request, and later plans must keep them."""
    case = kind((4, 4, 4), (40, 9, 33), **heads(4, 2))
    made = made_for(case)
    for seed in range(3):
        other = dataclasses.replace(case, seed=seed)
        plan_case(other, made, uniform_q_len=4)
        assert made._planned().limits.graph.max_qo_len == made._planned().limits.max_qo_len == 4
        run(other, make(other), made)
    for q_len in (None, 0, 2):
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(RuntimeArgumentError, match="uniform_q_len must stay 4 with use_cuda_graph=True, got None"),
        ):
            plan_case(case, made, uniform_q_len=q_len)


@pytest.mark.parametrize("case", KINDS[:2], ids=IDS[:2])
def test_an_untrue_uniform_q_len_warns(case: BatchCase) -> None:
    made = made_for(case)
    with pytest.warns(UserWarning, match="uniform_q_len=5 does not describe this batch.* 0 to 17 query tokens"):
        plan_case(case, made, uniform_q_len=5)
    assert made._planned().limits.graph.max_qo_len is None
    run(case, make(case), made)
    with pytest.raises(ArgumentTypeError, match="uniform_q_len must be an int"):
        plan_case(case, made, uniform_q_len=5.0)
