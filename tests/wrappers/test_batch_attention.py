"""`BatchAttention`: prefill and decode requests in one batch, lengths in tokens, always out and lse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    BatchAttention,
    LayoutError,
    NotPlannedError,
    NotSupported,
)
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


@pytest.mark.parametrize("executor", EVERYWHERE)
@pytest.mark.parametrize(("mask", "layout"), [("none", "NHD"), ("causal", "HND")])
def test_mixed_batches(mask: str, layout: str, executor: Executor) -> None:
    case = dataclasses.replace(CASE, kv_layout=layout, cache="one")
    inputs = make(case, executor.device)
    with executor.active():
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


BAD: list[tuple[int, Any, str, type]] = [
    (
        3,
        torch.tensor([33, 12, 5, 1, 8]),
        "kv_len_arr must be within 0..0, .*pages; request 3 has 1",
        ArgumentError,
    ),
    (
        3,
        torch.tensor([49, 12, 5, 0, 8]),
        "kv_len_arr must be within 0..48, .*pages; request 0 has 49",
        ArgumentError,
    ),
    (3, torch.tensor([-1, 12, 5, 0, 8]), "kv_len_arr must be within 0..48, .*; request . has -1", ArgumentError),
    (3, KV_LEN[:4], r"kv_len_arr must have shape \[batch_size\]", ArgumentError),
    (3, KV_LEN.float(), "kv_len_arr must have dtype int32 or int64", ArgumentError),
    (3, CASE.kv_lens, "kv_len_arr must be a torch.Tensor", ArgumentTypeError),
    (0, torch.tensor([0, 1, 13]), "qo_indptr and kv_indptr must both have batch_size", ArgumentError),
    (5, 3, "num_qo_heads", ArgumentError),
]


@pytest.mark.parametrize(("place", "value", "message", "error"), BAD)
def test_bad_plans_are_named(place: int, value: Any, message: str, error: type) -> None:
    arguments = plan_arguments(make(CASE))
    arguments[place] = value
    with pytest.raises(error, match=message):
        made(REFERENCE).plan(*arguments)


def test_bad_calls_are_named() -> None:
    inputs = make(dataclasses.replace(CASE, dtype="bfloat16"))
    with pytest.raises(LayoutError, match="kv_layout must be one of"):
        BatchAttention("HDN", "cpu")
    wrapper = made(REFERENCE)
    with pytest.raises(NotPlannedError, match=r"BatchAttention.plan\(\) must come before run"):
        wrapper.run(inputs.q, *inputs.kv)
    wrapper.plan(*plan_arguments(inputs))
    with pytest.raises(ArgumentError, match=r"logits_soft_cap of run\(\) must be 0 or the planned 0.0, got 30.0"):
        wrapper.run(inputs.q, *inputs.kv, logits_soft_cap=30.0)
    with pytest.raises(NotSupported, match="refuses profiler_buffer"):
        wrapper.run(inputs.q, *inputs.kv, profiler_buffer=torch.zeros(8))
    with pytest.raises(LayoutError, match="variant must be one of 'independent'"):
        wrapper.prewarm_paged_kv_stride_variant("equal")
