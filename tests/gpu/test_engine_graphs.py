"""Graphs as engines capture them: options left open by the plan, fewer heads than planned, lengths written later."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_attn import RuntimeArgumentError
from tests.gpu import marks
from tests.support.batch_case import (
    BatchCase,
    call,
    decode,
    dims,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    wrapper,
)
from tests.support.graphs import CapturedLayers, cuda_graph, graph_wrapper, smaller
from tests.support.right import assert_right

pytestmark = marks.SM80

CASES = [
    paged((300, 5, 40), (900, 700, 333), page_size=16, **heads(4, 2)),
    ragged((300, 5, 40), (900, 700, 333), **heads(4, 2)),
    decode((900, 700, 333), page_size=1, **heads(4, 2)),
    decode((900, 700, 333), page_size=16, q_len=3, **heads(4, 2), dtype="bfloat16"),
]
IDS = ["paged", "ragged", "decode", "verify"]


@pytest.mark.parametrize("backend", ["auto", "fa2"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_layers_of_one_plan(case: BatchCase, backend: str) -> None:
    captured = CapturedLayers(case, "cuda", cuda_graph, backend=backend)
    for other in smaller(case, 6):
        captured.replay(other)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_variant_first_met_in_a_capture_is_refused(case: BatchCase) -> None:
    made: Any = graph_wrapper(case, "cuda", 3000, 0)[0]
    inputs = make(case, "cuda")
    made.begin_forward(**plan_arguments(case, inputs))
    made.forward(inputs.q, *inputs.kv, sm_scale=0.3)
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(RuntimeArgumentError, match="a run must precede its capture"),
    ):
        made.forward(inputs.q, *inputs.kv, sm_scale=0.4)
    made.forward(inputs.q, *inputs.kv, sm_scale=0.4)


def test_lengths_written_after_a_plan() -> None:
    """vLLM's way: a plan of upper bounds, and exact lengths that only the device knows."""
    bound = paged((1,) * 40, (800,) * 40, page_size=8, **heads(4, 1), **dims(128), disable_split_kv=True)
    inputs = make(bound, "cuda")
    exact = tuple(range(20, 820, 20))
    made: Any = wrapper(bound, "cuda", backend="fa2")
    made.plan(**plan_arguments(bound, inputs))
    shortened = [dataclasses.replace(r, k=r.k[:n], v=r.v[:n]) for r, n in zip(inputs.requests, exact, strict=True)]
    pages = torch.tensor([-(-n // 8) for n in exact], device="cuda")
    starts = torch.arange(40, device="cuda") * 100
    rows = [
        made._plan.request.lengths.kv_indices[s : s + n] for s, n in zip(starts.tolist(), pages.tolist(), strict=True)
    ]
    made._plan.request.lengths.kv_indices[: int(pages.sum())] = torch.cat(rows).clone()
    indptr = made._paged_kv_indptr_buf
    indptr[1:].copy_(pages.cumsum(0))
    made._paged_kv_last_page_len_buf.copy_((torch.tensor(exact, device="cuda") - 1) % 8 + 1)
    case = dataclasses.replace(bound, kv_lens=exact)
    assert_right(case, dataclasses.replace(inputs, requests=shortened), *call(bound, inputs, made))


@pytest.mark.parametrize("layout", ["NH", "HN"])
def test_lse_form_in_a_graph(layout: str) -> None:
    case = CASES[0]
    inputs = make(case, "cuda")
    made: Any = graph_wrapper(case, "cuda", 3000, 0)[0]
    made.plan(**plan_arguments(case, inputs))
    expected = made.run(inputs.q, *inputs.kv, return_lse=True)[1] * 0.6931471805599453
    form = {"lse_base": "ln", "lse_layout": layout, "return_lse": True}
    made.run(inputs.q, *inputs.kv, **form)
    (_, lse), again = cuda_graph(lambda: made.run(inputs.q, *inputs.kv, **form))
    lse.zero_()
    again()
    torch.testing.assert_close(lse if layout == "NH" else lse.t(), expected, rtol=1e-6, atol=1e-6)
