"""Wrappers with attention sinks: positional sinks and sm_scale, one plan for every scale, FlashInfer's `jit_args`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import cute_attn
from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    NotPlannedError,
    NotSupported,
)
from tests.support.dense_attention import EVERYWHERE, assert_near, attention, random
from tests.support.executors import CUDA, REFERENCE, Executor, needs_gpu

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 8
QO, KV = (5, 1, 9), (30, 17, 9)
QO_INDPTR = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
INDPTR, INDICES = torch.tensor([0, 4, 7, 9], dtype=torch.int32), torch.tensor([7, 2, 5, 0, 8, 1, 6, 3, 4]).int()
PAGES = INDPTR, INDICES, torch.tensor([6, 1, 1])
SINKS = torch.tensor([0.3, -2.0, 4.0, 0.0])
MADE_FOR = {"q_data_type": torch.float16, "kv_data_type": torch.float16, "head_dim_qk": DIM, "head_dim_vo": DIM}
PLAN: dict[str, Any] = {"q_data_type": torch.float16, "kv_data_type": torch.float16, "causal": True}


def jit_args(uri: str = "batch_prefill_attention_sink_f16_swa_False_fa2") -> tuple[Any, ...]:
    """FlashInfer's arguments of the variant, its CUDA source aside."""
    dtypes = torch.float16, torch.float16, torch.float16, torch.int32
    return uri, *dtypes, DIM, DIM, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", "struct"


def cache(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = random(sum(QO), HEADS, DIM, device=device, seed=1)
    k, v = (random(9, PAGE, KV_HEADS, DIM, device=device, seed=seed) for seed in (2, 3))
    return q, k, v


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, window: int = -1) -> Any:
    """The oracle, request by request, over the pages put in order."""
    outs, row = [], 0
    for i, (qo_len, kv_len) in enumerate(zip(QO, KV, strict=True)):
        pages = PAGES[1][PAGES[0][i] : PAGES[0][i + 1]].to(k.device)
        keep = torch.ones(qo_len, kv_len, dtype=torch.bool).tril(kv_len - qo_len)
        keep = keep.triu(kv_len - qo_len - window) if window >= 0 else keep
        keys = (x[pages].flatten(0, 1)[:kv_len] for x in (k, v))
        outs.append(attention(q[row : row + qo_len], *keys, keep, sm_scale, sinks=SINKS))
        row += qo_len
    return tuple(map(torch.cat, zip(*outs, strict=True)))


def made(executor: Executor, **options: Any) -> BatchAttentionWithAttentionSinkWrapper:
    workspace = torch.zeros(8 << 20, dtype=torch.uint8, device=executor.device)
    return BatchAttentionWithAttentionSinkWrapper(workspace, backend=executor.backend, **{**MADE_FOR, **options})


@pytest.mark.parametrize("executor", EVERYWHERE)
@pytest.mark.parametrize("window", [-1, 11])
def test_sinks_and_scale_follow_the_cache(window: int, executor: Executor) -> None:
    q, k, v = cache(executor.device)
    sinks = SINKS.to(executor.device)
    with executor.active():
        wrapper = made(executor, window_left=window)
        wrapper.plan(QO_INDPTR, *PAGES, HEADS, KV_HEADS, DIM, PAGE, window_left=window, sm_scale=0.3, **PLAN)
        out, lse = wrapper.run(q, (k, v), sinks, 0.2, return_lse=True)
        planned = wrapper.run(q, (k, v), sinks)
        buffer = torch.empty_like(q)
        doubled = wrapper.run(q, (k, v), sinks, 0.3, v_scale=2.0, out=buffer)
    assert_near(out, lse, expected(q, k, v, 0.2, window))
    assert_near(planned, None, expected(q, k, v, 0.3, window))
    assert doubled is buffer
    assert_near(doubled, None, expected(q, k, 2 * v, 0.3, window))


def test_another_scale_is_no_other_plan() -> None:
    q, k, v = cache()
    wrapper = made(REFERENCE)
    wrapper.plan(QO_INDPTR, *PAGES, HEADS, KV_HEADS, DIM, PAGE, **PLAN)
    plan = wrapper._planned()
    for sm_scale in (0.1, 1.0, -0.5, 0.0):
        assert_near(wrapper.run(q, (k, v), SINKS, sm_scale), None, expected(q, k, v, sm_scale))
    assert wrapper._planned() is plan
    by_keyword = wrapper.run(q, (k, v), sinks=SINKS, q_scale=0.5, k_scale=torch.tensor(2.0))
    assert_near(by_keyword, None, expected(q, k, v, DIM**-0.5))
    scaled = wrapper.run(q, (k, v), SINKS, 0.1, q_scale=torch.tensor([3.0]))
    assert_near(scaled, None, expected(q, k, v, 0.3))
    tiny = torch.tensor(2.0**-24, dtype=torch.float16)  # a third of it is 0 in its own dtype
    scaled = wrapper.run(q, (k, v), SINKS, DIM**-0.5 / 3, q_scale=tiny, k_scale=2.0**24)
    assert_near(scaled, None, expected(q, k, v, DIM**-0.5 / 3))


def test_scales_change_with_fixed_buffers() -> None:
    """CUDA-graph mode: plans with other lengths, and runs with other scales, keep addresses and options."""
    q, k, v = cache()
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 4, 9, 3)]
    wrapper = BatchAttentionWithAttentionSinkWrapper(torch.zeros(1 << 18), "NHD", True, *buffers, **MADE_FOR)
    for last, sm_scale in ((torch.tensor([1, 1, 1]), 0.4), (PAGES[2], 0.2), (PAGES[2], 0.7)):
        wrapper.plan(QO_INDPTR, *PAGES[:2], last, HEADS, KV_HEADS, np.int64(DIM), PAGE, **PLAN)
        out = wrapper.run(q, (k, v), SINKS, sm_scale)
    assert_near(out, None, expected(q, k, v, 0.7))


@pytest.mark.parametrize("kind", [tuple, list])
def test_jit_args_of_the_sink_variant(kind: Any) -> None:
    q, k, v = cache()
    options = {"jit_args": kind(jit_args()), "jit_kwargs": {"use_sliding_window": False}}
    paged: Any = BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1 << 18), "NHD", backend="auto", **options)
    paged.plan(QO_INDPTR, *PAGES, HEADS, KV_HEADS, DIM, PAGE, **PLAN)
    assert_near(paged.run(q, (k, v), SINKS, 0.2), None, expected(q, k, v, 0.2))
    ragged: Any = BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1 << 18), kv_layout="NHD", **options)
    order = [PAGES[1][PAGES[0][i] : PAGES[0][i + 1]] for i in range(3)]
    keys, values = (torch.cat([x[pages].flatten(0, 1)[:n] for pages, n in zip(order, KV, strict=True)]) for x in (k, v))
    ragged.plan(QO_INDPTR, torch.tensor([0, *KV]).cumsum(0), HEADS, KV_HEADS, DIM, **PLAN)
    out, lse = ragged.run(q, keys, values, SINKS, 0.2, return_lse=True)
    assert_near(out, lse, expected(q, k, v, 0.2))
    assert_near(ragged.run_return_lse(q, keys, values, SINKS, 0.7)[0], None, expected(q, k, v, 0.7))


REFUSED: list[tuple[Any, Any, str, type]] = [
    (jit_args(uri="my_attention"), None, "jit_args=.*: variants written in CUDA", NotSupported),
    ((*jit_args()[:7], ["sink", "bias"], ["float", "half"], *jit_args()[9:]), None, "jit_args", NotSupported),
    (jit_args()[:9], None, "jit_args", NotSupported),
    ("batch_prefill_attention_sink", None, "jit_args", NotSupported),
    ((*jit_args()[:7], 5, *jit_args()[8:]), None, "jit_args", NotSupported),
    (None, {"use_sliding_window": True}, "jit_kwargs", NotSupported),
    (jit_args(), {"variant_owns": 1}, "jit_kwargs must be a dict of use_sliding_window", ArgumentTypeError),
    (jit_args(), {"use_sliding_window": 1}, "use_sliding_window.* must be True or False", ArgumentTypeError),
    (jit_args(), {"pos_encoding_mode": 7}, "pos_encoding_mode.* must be one of .* by number, got 7", ArgumentError),
    ((*jit_args()[:3], torch.float32, *jit_args()[4:]), None, "dtype_o of jit_args must be its dtype_q", ArgumentError),
]


@pytest.mark.parametrize(("args", "kwargs", "message", "error"), REFUSED)
@pytest.mark.parametrize("wrapper", [BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper])
def test_other_variants_are_refused(wrapper: Any, args: Any, kwargs: Any, message: str, error: type) -> None:
    with pytest.raises(error, match=message):
        wrapper(torch.zeros(1 << 16), jit_args=args, jit_kwargs=kwargs)


PLANS: list[tuple[dict[str, Any], str]] = [
    ({"q_data_type": "bfloat16"}, "q_data_type of plan.* made for, torch.float16; got torch.bfloat16"),
    ({"kv_data_type": torch.float8_e4m3fn}, "kv_data_type of plan"),
    ({"q_data_type": torch.zeros(2)}, "q_data_type of plan"),
    ({"head_dim_vo": 128}, "head_dim_vo of plan.* made for, 64; got 128"),
    ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode of plan.* 'NONE'; got 'ALIBI'"),
]


def test_jit_args_that_ask_for_nothing_are_accepted() -> None:
    for options in ({"jit_args": None, "jit_kwargs": {}}, {"jit_args": None, "jit_kwargs": None}):
        assert BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1 << 16), **options)._sink_variant is None


@pytest.mark.parametrize(("changed", "message"), PLANS)
def test_plans_agree_with_the_constructor(changed: dict[str, Any], message: str) -> None:
    wrapper = made(REFERENCE)
    with pytest.raises(ArgumentError, match=message):
        wrapper.plan(QO_INDPTR, *PAGES, HEADS, KV_HEADS, DIM, PAGE, **{**PLAN, **changed})


def test_bad_runs_are_named() -> None:
    q, k, v = cache()
    wrapper = made(REFERENCE)
    with pytest.raises(NotPlannedError):
        wrapper.run(q, (k, v), SINKS, 0.2)
    wrapper.plan(QO_INDPTR, *PAGES, HEADS, KV_HEADS, DIM, PAGE, **PLAN)
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {}, "sinks must follow keys and values"),
        ((SINKS,), {"sinks": SINKS}, "sinks were given twice"),
        ((SINKS, 0.2, 1.0), {}, "the positional arguments after keys and values are sinks and sm_scale"),
        ((SINKS, "0.2"), {}, "sm_scale must be a number"),
        ((SINKS, math.inf), {}, "sm_scale must be finite"),
        ((SINKS[:2],), {}, r"sinks must have shape \[num_qo_heads\]"),
    ]
    for args, options, message in bad:
        with pytest.raises(ValueError, match=message):
            wrapper.run(q, (k, v), *args, **options)
    wrapper.plan(QO_INDPTR, *PAGES, HEADS, KV_HEADS, DIM, PAGE, sm_scale=0, **PLAN)
    with pytest.raises(ArgumentError, match=r"sm_scale of plan.* must not be 0"):
        wrapper.run(q, (k, v), SINKS, 0.2)


def test_bad_constructors_are_named() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"q_data_type": 16}, "q_data_type must be a torch.dtype or its name"),
        ({"head_dim_vo": 0}, "head_dim_vo must be at least 1"),
        ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode must be one of"),
        ({"use_fp16_qk_reduction": 1}, "use_fp16_qk_reduction must be True or False"),
        ({"window_left": None}, "window_left must be an int"),
        ({"backend": "cutlass"}, "cutlass"),
    ]
    for changed, message in bad:
        with pytest.raises(ValueError, match=message):
            cute_attn.BatchAttentionWithAttentionSinkWrapper(torch.zeros(64), **changed)


@needs_gpu
def test_a_captured_run_keeps_its_scale() -> None:
    """A run with another scale than the planned one is captured, and replayed with other lengths."""
    device = "cuda"
    q, k, v = cache(device)
    sinks, buffers = SINKS.to(device), [torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 4, 9, 3)]
    names = "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"
    wrapper = made(CUDA, use_cuda_graph=True, **dict(zip(names, buffers, strict=True)))
    shorter = PAGES[0].clone(), PAGES[1], torch.tensor([1, 1, 1])
    wrapper.plan(QO_INDPTR, *shorter, HEADS, KV_HEADS, DIM, PAGE, **PLAN)
    out = torch.empty_like(q)
    wrapper.run(q, (k, v), sinks, 0.2, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, (k, v), sinks, 0.2, out=out)
    wrapper.plan(QO_INDPTR, *PAGES, HEADS, KV_HEADS, DIM, PAGE, **PLAN)
    graph.replay()
    assert_near(out, None, expected(q, k, v, 0.2))
