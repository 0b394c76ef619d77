"""`fast_decode_plan` and `fast_prefill_plan`, called and in place of the methods. Calls of engines: `tests/engines`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, ArgumentTypeError, RuntimeArgumentError, fast_decode_plan, fast_prefill_plan
from tests.support.batch_case import (
    BatchCase,
    call,
    decode,
    heads,
    make,
    paged,
    plan_arguments,
    random_lengths,
    wrapper,
)
from tests.support.right import planned
from tests.wrappers import kinds
from tests.wrappers.kinds import eager_and_graph, made_for, plan_case

DECODE = decode((40, 3, 9), page_size=4, **heads(4, 2))
PREFILL = paged((3, 3, 3), (40, 9, 33), page_size=1, **heads(4, 2))
NOT_FAST = ("o_data_type", "lse_base")


def fast_arguments(case: BatchCase) -> dict[str, Any]:
    arguments = plan_arguments(case, make(case))
    return {name: value for name, value in arguments.items() if name not in NOT_FAST}


def run(case: BatchCase, made: Any) -> None:
    kinds.run(case, make(case), made)


# ---- decode


@pytest.mark.parametrize("q_len", [1, 3])
@eager_and_graph
@pytest.mark.parametrize("attribute", ["", "plan", "begin_forward"])
def test_decode(attribute: str, graph: bool, q_len: int) -> None:
    """The first plan is a full one; later ones are fast, with the o_data_type and lse_base of the first."""
    case = dataclasses.replace(DECODE, qo_lens=(q_len,) * 3, o_dtype="float32", lse_base="ln")
    made = made_for(case, graph, pages=200)
    made.begin_forward(**plan_arguments(case, make(case)))
    run(case, made)
    if attribute:
        setattr(made, attribute, functools.partial(fast_decode_plan, made))
    plan = getattr(made, attribute) if attribute else functools.partial(fast_decode_plan, made)
    for seed in range(3):
        other = random_lengths(dataclasses.replace(case, seed=seed), seed, 60)
        plan(**fast_arguments(other))
        run(other, made)
        assert call(other, make(other), made)[0].dtype == torch.float32
    assert made.workspace_size(**plan_arguments(case, make(case))) == (0, 0)


def test_bounds_of_pages_on_the_cpu_replace_those_on_the_gpu() -> None:
    case = dataclasses.replace(DECODE, page_size=1)
    made = wrapper(case)
    unread = {"indptr": torch.zeros(4, dtype=torch.int32), "last_page_len": torch.full((3,), 7, device="meta")}
    fast_decode_plan(made, **fast_arguments(case) | unread, global_override_indptr_cpu=make(case).kv_indptr)
    run(case, made)


def test_q_len_is_named_by_its_errors() -> None:
    made = made_for(DECODE)
    plan_case(DECODE, made)
    with pytest.raises(RuntimeArgumentError, match="q_len_per_req must stay 1 with use_cuda_graph=True, got 2"):
        fast_decode_plan(made, **{**fast_arguments(DECODE), "q_len_per_req": 2})
    with pytest.raises(ValueError, match="q_len_per_req must be at least 1, got 0"):
        fast_decode_plan(made, **{**fast_arguments(DECODE), "q_len_per_req": 0})
    with pytest.raises(NotImplementedError, match="is_causal=True with q_len_per_req=1"):
        plan_case(DECODE, made, is_causal=True)
    plan_case(DECODE, made, is_causal=False)
    run(DECODE, made)
    inputs = make(dataclasses.replace(DECODE, qo_lens=(2, 2, 2)))
    with pytest.raises(ValueError, match=r"q must have the planned 3 rows \(batch size 3 \* q_len_per_req 1 of plan"):
        made.run(inputs.q, *inputs.kv)


# ---- prefill


def host_lengths(case: BatchCase) -> dict[str, Any]:
    inputs = make(case)
    return {
        "qo_indptr_host": inputs.qo_indptr,
        "kv_indptr_host": inputs.kv_indptr,
        "kv_lens_host": torch.tensor(case.kv_lens, dtype=torch.int32),
        "max_q_len": max(case.qo_lens),
        "max_kv_len": max(case.kv_lens),
    }


def fast_prefill(case: BatchCase, plan: Any, **more: Any) -> None:
    """SGLang's call. The arrays that are on its GPU hold nothing here: they must not be read."""
    inputs = make(case)
    unread = torch.full((4,), -7, dtype=torch.int32)
    plan(
        *(unread, unread, inputs.kv_indices, unread, 4, 2, 64, case.page_size),
        q_data_type=torch.float16,
        kv_data_type=torch.float16,
        custom_mask=inputs.masks.get("custom_mask"),
        causal=case.mask == "causal",
        non_blocking=True,
        fixed_split_size=None,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        **{**host_lengths(case), **more},
    )


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("mask", ["none", "custom", "causal"])
@eager_and_graph
def test_prefill(graph: bool, mask: str, page_size: int) -> None:
    case = dataclasses.replace(PREFILL, mask=mask, page_size=page_size, o_dtype="float32", logits_soft_cap=4.0)
    made = made_for(case, graph, pages=200)
    made.begin_forward(**plan_arguments(case, make(case)))
    run(case, made)
    made.begin_forward = functools.partial(fast_prefill_plan, made)
    for seed in range(3):
        other = dataclasses.replace(random_lengths(case, seed, 40), qo_lens=(3, 3, 3), seed=seed)
        fast_prefill(other, made.begin_forward, uniform_verify_width=3)
        run(other, made)


def test_prefill_without_a_plan_before() -> None:
    made = wrapper(PREFILL)
    unread = dict.fromkeys(("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"))
    sizes = {**heads(4, 2), "head_dim_qk": 64, "page_size": 1}
    indices = make(PREFILL).kv_indices
    fast_prefill_plan(made, paged_kv_indices=indices, **unread, **sizes, **host_lengths(PREFILL))
    run(PREFILL, made)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_lens_host": torch.tensor([40, 9, 32])}, "request 2 has 32 keys, but 33 pages of 1"),
        ({"kv_lens_host": torch.tensor([40, 9])}, r"kv_lens_host must have shape \[batch_size\] = \(3,\), got 2"),
        ({"qo_indptr_host": torch.zeros(4, device="meta")}, "qo_indptr_host must be on the CPU"),
        ({"uniform_verify_width": 2}, "uniform_verify_width must be .* request 0 has 3, got 2"),
        ({"max_q_len": 2}, "max_token_per_sequence must not be below"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_contradictory_lengths(wrong: dict[str, Any], message: str) -> None:
    made, _ = planned(PREFILL)
    with pytest.raises(ArgumentError, match=message):
        fast_prefill(PREFILL, functools.partial(fast_prefill_plan, made), **wrong)
    run(PREFILL, made)


def test_wrappers_of_other_types() -> None:
    with pytest.raises(ArgumentTypeError, match="wrapper must be a BatchPrefillWithPagedKVCacheWrapper"):
        fast_prefill(PREFILL, functools.partial(fast_prefill_plan, wrapper(DECODE)))
    with pytest.raises(ArgumentTypeError, match="wrapper must be a BatchDecodeWithPagedKVCacheWrapper"):
        fast_decode_plan(wrapper(PREFILL), **fast_arguments(DECODE))
