"""`BatchAttention`: prefill and decode requests in one batch, lengths in tokens, always out and lse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_attn import BatchAttention
from tests.support.batch_case import BatchInputs, heads, make, paged
from tests.support.dense_attention import EVERYWHERE, assert_near
from tests.support.executors import REFERENCE, Executor
from tests.support.formula import batch_formula

# Decode, prefill, decode, no keys, no query.
CASE = paged((1, 12, 1, 3, 0), (33, 12, 5, 0, 8), page_size=8, **heads(4, 2))
KV_LEN = torch.tensor(CASE.kv_lens, dtype=torch.int32)


def plan_arguments(inputs: BatchInputs) -> list[Any]:
    """The first request has a page more than its keys need."""
    first, device = int(inputs.kv_indptr[1]), inputs.q.device
    indices = torch.cat((inputs.kv_indices[:first], inputs.kv_indices[-1:], inputs.kv_indices[first:]))
    kv_indptr = inputs.kv_indptr + (torch.arange(6) > 0).int()
    return [*(x.to(device) for x in (inputs.qo_indptr, kv_indptr, indices, KV_LEN)), 4, 2, 64, 64, 8]


def expected(inputs: BatchInputs, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle. `changes`: of the case."""
    return batch_formula(dataclasses.replace(CASE, **changes), inputs)


def made(executor: Executor, layout: str = "NHD") -> BatchAttention:
    wrapper = BatchAttention(layout, executor.device)
    wrapper._backend = executor.backend
    return wrapper


@EVERYWHERE
@pytest.mark.parametrize(("mask", "layout"), [("none", "NHD"), ("causal", "HND")])
def test_mixed_batches(mask: str, layout: str, executor: Executor) -> None:
    case = dataclasses.replace(CASE, kv_layout=layout, cache="one")
    inputs = make(case, executor.device)
    wrapper = made(executor, layout)
    half = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
    options = {"causal": mask == "causal", "logits_soft_cap": 5.0, "sm_scale": 0.2}
    wrapper.plan(*plan_arguments(inputs), **options, **half)
    out, lse = wrapper.run(inputs.q, *inputs.kv, logits_soft_cap=5.0)
    given = torch.empty_like(inputs.q), torch.empty(len(inputs.q), 4, device=executor.device)
    scaled = wrapper.run(inputs.q, *inputs.kv, *given, k_scale=0.5, v_scale=2.0)
    assert_near(out, lse, expected(inputs, mask=mask, sm_scale=0.2, logits_soft_cap=5.0))
    assert scaled[0] is given[0]
    assert scaled[1] is given[1]
    assert_near(*scaled, expected(inputs, mask=mask, sm_scale=0.1, logits_soft_cap=5.0, v_scale=2.0))


def test_bfloat16_is_the_default_and_k_and_v_may_differ_in_strides() -> None:
    inputs = make(dataclasses.replace(CASE, dtype="bfloat16"))
    wrapper, ((k, v),) = made(REFERENCE), inputs.kv
    wrapper.plan(*plan_arguments(inputs))
    wrapper.prewarm_paged_kv_stride_variant()
    out, lse = wrapper.run(inputs.q, (k, torch.stack((k, v), 1)[:, 1]))
    assert_near(out, lse, expected(inputs, dtype="bfloat16"))
    assert wrapper.float_workspace_buffer.device == inputs.q.device
