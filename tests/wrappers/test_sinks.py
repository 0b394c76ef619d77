"""Wrappers with attention sinks: positional sinks and sm_scale, one plan for every scale, FlashInfer's `jit_args`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import BatchAttentionWithAttentionSinkWrapper
from cute_attn.errors import ArgumentError
from cute_attn.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from tests.request.test_batch_errors import variant
from tests.support.batch_case import BatchInputs, heads, make, paged, ragged
from tests.support.dense_attention import EVERYWHERE, assert_near
from tests.support.engine_case import Graph
from tests.support.executors import CUDA, REFERENCE, Executor
from tests.support.formula import batch_formula

CASE = paged((5, 1, 9), (30, 17, 9), page_size=8, mask="causal", sinks=True, **heads(4, 2))
RAGGED = ragged(CASE.qo_lens, CASE.kv_lens, mask="causal", sinks=True, **heads(4, 2))
INPUTS, SIZES = make(CASE), (4, 2, 64, 8)
MADE_FOR = {"q_data_type": torch.float16, "kv_data_type": torch.float16, "head_dim_qk": 64, "head_dim_vo": 64}
PLAN: dict[str, Any] = {"q_data_type": torch.float16, "kv_data_type": torch.float16, "causal": True}
BUFFERS = "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"


def expected(sm_scale: float, inputs: BatchInputs = INPUTS, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle. `changes`: of the case."""
    return batch_formula(dataclasses.replace(CASE, sm_scale=sm_scale, **changes), inputs)


def index(inputs: BatchInputs = INPUTS) -> tuple[torch.Tensor, ...]:
    return inputs.qo_indptr, inputs.kv_indptr, inputs.kv_indices, inputs.last_page_len


def made(executor: Executor, **options: Any) -> BatchAttentionWithAttentionSinkWrapper:
    workspace = torch.zeros(8 << 20, dtype=torch.uint8, device=executor.device)
    return BatchAttentionWithAttentionSinkWrapper(workspace, backend=executor.backend, **{**MADE_FOR, **options})


@EVERYWHERE
@pytest.mark.parametrize("window", [-1, 11])
def test_sinks_and_scale_follow_the_cache(window: int, executor: Executor) -> None:
    inputs = make(CASE, executor.device)
    given = inputs.q, *inputs.kv, inputs.sinks
    wrapper = made(executor, window_left=window)
    wrapper.plan(*index(inputs), *SIZES, window_left=window, sm_scale=0.3, **PLAN)
    out, lse = wrapper.run(*given, 0.2, return_lse=True)
    planned = wrapper.run(*given)
    buffer = torch.empty_like(inputs.q)
    doubled = wrapper.run(*given, 0.3, v_scale=2.0, out=buffer)
    assert_near(out, lse, expected(0.2, window_left=window))
    assert_near(planned, None, expected(0.3, window_left=window))
    assert doubled is buffer
    assert_near(doubled, None, expected(0.3, window_left=window, v_scale=2.0))


def test_another_scale_is_no_other_plan() -> None:
    wrapper, tensors, sinks = made(REFERENCE), (INPUTS.q, *INPUTS.kv), INPUTS.sinks
    wrapper.plan(*index(), *SIZES, **PLAN)
    plan = wrapper._planned()
    for sm_scale in (0.1, 1.0, -0.5, 0.0):
        assert_near(wrapper.run(*tensors, sinks, sm_scale), None, expected(sm_scale))
    assert wrapper._planned() is plan
    by_keyword = wrapper.run(*tensors, sinks=sinks, q_scale=0.5, k_scale=torch.tensor(2.0))
    assert_near(by_keyword, None, expected(1 / 8))
    assert_near(wrapper.run(*tensors, sinks, 0.1, q_scale=torch.tensor([3.0])), None, expected(0.3))
    tiny = torch.tensor(2.0**-24, dtype=torch.float16)  # a third of it is 0 in its own dtype
    assert_near(wrapper.run(*tensors, sinks, 1 / 24, q_scale=tiny, k_scale=2.0**24), None, expected(1 / 24))


def test_scales_change_with_fixed_buffers(device: str) -> None:
    """CUDA-graph mode: plans with other lengths, and runs with other scales than the planned one, keep addresses and
    options; a captured run keeps its scale.
    """
    inputs = make(CASE, device)
    buffers = dict(zip(BUFFERS, (torch.zeros_like(x, device=device) for x in index()), strict=True))
    wrapper = made(CUDA if device == "cuda" else REFERENCE, use_cuda_graph=True, **buffers)

    def run(sm_scale: float) -> torch.Tensor:
        return wrapper.run(inputs.q, *inputs.kv, inputs.sinks, sm_scale)

    wrapper.plan(*index()[:3], torch.tensor([1, 1, 1]), 4, 2, np.int64(64), 8, **PLAN)
    run(0.4)
    graph = Graph(device, lambda: run(0.2))
    wrapper.plan(*index(), *SIZES, **PLAN)
    assert_near(graph.replay(), None, expected(0.2))
    assert_near(run(0.7), None, expected(0.7))


@pytest.mark.parametrize("kind", [tuple, list])
def test_jit_args_of_the_sink_variant(kind: Any) -> None:
    for nothing in ({}, None):
        assert BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1 << 16), jit_kwargs=nothing)._sink_variant is None
    options = {"jit_args": kind(variant()), "jit_kwargs": {"use_sliding_window": False}}
    paged: Any = BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1 << 18), "NHD", backend="auto", **options)
    paged.plan(*index(), *SIZES, **PLAN)
    assert_near(paged.run(INPUTS.q, *INPUTS.kv, INPUTS.sinks, 0.2), None, expected(0.2))
    ragged: Any = BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1 << 18), kv_layout="NHD", **options)
    inputs = make(RAGGED)
    ragged.plan(inputs.qo_indptr, inputs.kv_indptr, *SIZES[:3], **PLAN)
    out, lse = ragged.run(inputs.q, *inputs.kv, inputs.sinks, 0.2, return_lse=True)
    assert_near(out, lse, expected(0.2, inputs))
    assert_near(ragged.run_return_lse(inputs.q, *inputs.kv, inputs.sinks, 0.7)[0], None, expected(0.7, inputs))


def test_bad_runs_are_named() -> None:
    wrapper, tensors, sinks = made(REFERENCE), (INPUTS.q, *INPUTS.kv), INPUTS.sinks
    wrapper.plan(*index(), *SIZES, **PLAN)
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {}, "sinks must follow keys and values"),
        ((sinks,), {"sinks": sinks}, "sinks were given twice"),
        ((sinks, 0.2, 1.0), {}, "the positional arguments after keys and values are sinks and sm_scale"),
        ((sinks, "0.2"), {}, "sm_scale must be a number"),
        ((sinks, math.inf), {}, "sm_scale must be finite"),
        ((torch.zeros(2),), {}, r"sinks must have shape \[num_qo_heads\]"),
    ]
    for args, options, message in bad:
        with pytest.raises(ValueError, match=message):
            wrapper.run(*tensors, *args, **options)
    wrapper.plan(*index(), *SIZES, sm_scale=0, **PLAN)
    with pytest.raises(ArgumentError, match=r"sm_scale of plan.* must not be 0"):
        wrapper.run(*tensors, sinks, 0.2)
