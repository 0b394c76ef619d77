"""The decode functions without a plan, under all their names, on CPU tensors: numbers by the formula, forms of
arguments; helpers of `flashinfer.utils`. Errors: `tests/request/test_call_errors.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_attn.xqa
from cute_attn import FP4Tensor, trtllm_batch_decode_with_kv_cache, utils, xqa, xqa_batch_decode_with_kv_cache
from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.kernels.xqa.host.variant import cta_group_count
from cute_attn.utils import get_device_sm_count, get_trtllm_gen_multi_ctas_kv_counter_bytes
from tests.support.xqa_case import Built, XqaCase, build, random_case

CASE = XqaCase((5, 40), heads=(4, 2), head_dim=64)
DRAFTS = dataclasses.replace(CASE, q_len=3)
RAGGED = dataclasses.replace(DRAFTS, q_lens=(3, 1))
E4M3 = torch.float8_e4m3fn


def call(built: Built, **changes: Any) -> Any:
    return xqa_batch_decode_with_kv_cache(**(built.arguments | {"return_lse": False} | changes))


def trtllm(built: Built, **changes: Any) -> Any:
    arguments = {k: v for k, v in built.arguments.items() if k not in ("q_cu_seq_lens", "return_lse")}
    return trtllm_batch_decode_with_kv_cache(**arguments | changes)


def assert_same(call: Callable[..., Any], built: Built, *changes: dict[str, Any]) -> None:
    """The arguments may change so: the result does not."""
    expected = call(built)
    assert built.check(expected, None) == ""
    for change in changes:
        assert torch.equal(call(built, **change), expected), change


@pytest.mark.parametrize("seed", range(40))
def test_random(seed: int) -> None:
    built = build(random_case(seed, longest=200))
    out, lse = xqa_batch_decode_with_kv_cache(**built.arguments)
    assert built.check(out, lse) == ""


def test_shapes_of_results() -> None:
    assert call(build(CASE)).shape == (2, 4, 64)
    several = build(DRAFTS)
    assert call(several).shape == (2, 3, 4, 64)
    assert call(several, out=torch.empty(6, 4, 64, dtype=torch.bfloat16)).shape == (6, 4, 64)
    four = torch.empty(2, 3, 4, 64, dtype=torch.bfloat16)
    assert call(several, out=four) is four
    assert several.check(four, None) == ""
    assert call(build(dataclasses.replace(DRAFTS, q_lens=(0, 3)))).shape == (3, 4, 64)
    assert call(build(dataclasses.replace(CASE, seq_lens=()))).shape == (0, 4, 64)


def test_rows_of_no_request_need_an_out() -> None:
    """Query bounds may end early, as those of padded batches do, where nothing unwritten is returned."""
    built = build(RAGGED)
    query = built.arguments["query"]
    padded = torch.cat((query, query[:2]))
    with pytest.raises(ArgumentError, match="q_cu_seq_lens must end at 6, the rows of query, got 4"):
        call(built, query=padded)
    out = torch.full_like(padded, 7.0)
    call(built, query=padded, out=out)
    assert built.check(out[:4], None) == ""
    assert (out[4:] == 7).all()


def test_forms_of_arguments_do_not_matter() -> None:
    built = build(dataclasses.replace(CASE, sinks=True))
    a = built.arguments
    assert_same(
        call,
        built,
        {"kv_cache": [*a["kv_cache"]]},
        {"kv_cache": torch.stack(a["kv_cache"], 1)},
        {"seq_lens": a["seq_lens"].to(torch.uint32)},
        {"seq_lens": a["seq_lens"][:, None]},
        {"block_tables": torch.stack((a["block_tables"],) * 2, -1)[..., 0]},
        {"q_len_per_req": None, "o_scale": None},
        {"sinks": a["sinks"].reshape(2, 2), "bmm1_scale": torch.tensor(64**-0.5, dtype=torch.float64)},
        {"query": torch.cat((a["query"],) * 2, -1)[..., :64]},
        {"workspace_buffer": a["workspace_buffer"].view(torch.int32)},
        {"window_left": 10**30},
    )


def test_keywords_of_trtllm_that_ask_for_nothing() -> None:
    assert_same(
        trtllm,
        build(CASE),
        {"skip_softmax_threshold_scale_factor": None, "multi_ctas_kv_counter_buffer": None},
        {"skip_softmax_threshold_scale_factor": 0.0},
        {"multi_ctas_kv_counter_buffer": torch.zeros(64, dtype=torch.uint8), "enable_block_sparse_attention": False},
        {"cp_world": 1, "cp_rank": 0, "causal_seqlens_kv_global": None, "request_order": None},
        {"bf16q_fp8kv_transform_mode": "k_only"},
        {"backend": "xqa", "o_sf_scale": None},
        {"backend": "trtllm-gen", "uniform_q_len": 1},
        {"backend": "reference", "out_dtype": "bfloat16"},
        {"sinks": None, "uses_shared_paged_kv_idx": True},
    )


def test_values_in_pages_of_their_own() -> None:
    """The same pages, or a constant number of pages away in either direction."""
    built = build(CASE)
    table, (k, v) = built.arguments["block_tables"], built.arguments["kv_cache"]
    both, away = {"uses_shared_paged_kv_idx": False}, table + k.shape[0]
    same, behind, before = torch.cat((k, v)), torch.stack((table, away), 1), torch.stack((away, table), 1)
    assert_same(
        trtllm,
        built,
        both | {"block_tables": table[:, None].expand(-1, 2, -1)},
        both | {"block_tables": torch.stack((table, table), 1)},
        both | {"block_tables": behind, "kv_cache": (same, same)},
        both | {"block_tables": before, "kv_cache": (torch.cat((v, k)),) * 2},
    )


def test_one_axis_is_both_keys_and_values() -> None:
    built = build(CASE)
    k, _ = built.arguments["kv_cache"]
    assert torch.equal(call(built, kv_cache=k[:, None]), call(built, kv_cache=(k, k)))


def test_an_fp8_output_saturates() -> None:
    out = call(build(CASE), bmm2_scale=1e6, out=torch.empty(2, 4, 64, dtype=E4M3)).float()
    assert out.isfinite().all()
    assert out.abs().max() == 448


def test_trtllm_name() -> None:
    """Its layout is HND by default, its lse has rows of either kind, and its bounds have another name."""
    built = build(dataclasses.replace(DRAFTS, kv_layout="HND"))
    del built.arguments["kv_layout"]
    out, lse = trtllm(built, return_lse=True)
    assert out.shape == (6, 4, 64)
    assert built.check(out, lse) == ""
    given = torch.empty(4, 6)
    _, columns = trtllm(built, return_lse=True, lse_layout="HN", lse=given)
    assert columns is given
    assert torch.equal(columns, lse.t())
    assert torch.equal(trtllm(built, return_lse=True, lse_layout="HN")[1], lse.t())
    assert torch.equal(trtllm(built, lse_layout="HN"), out)
    with pytest.raises(ArgumentError, match=r"lse must have shape \[num_qo_heads, num_tokens\]"):
        trtllm(built, lse_layout="HN", lse=torch.empty(6, 4))
    ragged = build(RAGGED)
    bounds = {"cum_seq_lens_q": ragged.arguments["q_cu_seq_lens"], "max_q_len": ragged.arguments.pop("q_len_per_req")}
    assert ragged.check(*trtllm(ragged, return_lse=True, **bounds)) == ""


def test_the_base_2_scale() -> None:
    """It replaces bmm1_scale, as a tensor that the kernel reads."""
    built = build(CASE)
    scale = torch.tensor([CASE.scale / math.log(2)])
    assert built.check(trtllm(built, bmm1_scale=7.0, bmm1_scale_log2=scale), None) == ""


# ---- cute_attn.xqa is a module and a function


def test_the_module_can_be_called() -> None:
    built = build(CASE)
    given = built.low_level(words=3)
    assert xqa(**given) is None
    assert built.check(given["output"], None) == ""
    assert inspect.ismodule(xqa)
    assert xqa.xqa is cute_attn.xqa.xqa
    assert xqa.xqa_batch_decode_with_kv_cache is cute_attn.xqa_batch_decode_with_kv_cache
    assert inspect.signature(xqa) == inspect.signature(xqa.xqa)


def test_the_low_level_form() -> None:
    """Its scale is 1 / sqrt(head_dim) by default, its window counts the row itself, and it writes output."""
    built = build(dataclasses.replace(CASE, q_len=2, window_left=6, bmm1_scale=1.5 / 8, bmm2_scale=0.5))
    a = built.arguments
    q, (k, v) = a["query"].view(2, 1, 2, 4, 64), a["kv_cache"]
    output = torch.zeros_like(q)
    semaphores, scratch = torch.zeros(4096, dtype=torch.uint32), torch.empty(32 << 20, dtype=torch.uint8)
    xqa(
        q, k, v, a["block_tables"], a["seq_lens"][:, None], output, scratch, semaphores, 2, 16,
        q_scale=3.0, kv_scale=0.5, sliding_win_size=7, q_seq_len=2,
    )  # fmt: skip
    assert built.check(output, None) == ""
    with pytest.raises(ArgumentError, match="page_size"):
        xqa(q, k, v, a["block_tables"], a["seq_lens"], output, scratch, semaphores, 2, 32)


def test_scales_of_the_low_level_form_are_multiplied_in_fp32() -> None:
    """The product of these overflows in their own dtype."""
    built = build(dataclasses.replace(CASE, bmm1_scale=0.25, bmm2_scale=2.0**17))
    half, nothing = torch.float16, torch.empty(0, dtype=torch.uint8)
    scales = {"q_scale": torch.tensor(2.0**-10, dtype=half), "kv_scale": torch.tensor([2048.0], dtype=half)}
    given = built.low_level(workspace_buffer=nothing, semaphores=nothing, rcp_out_scale=64.0, **scales)
    xqa(**given)
    assert built.check(given["output"], None) == ""


@pytest.mark.parametrize("ctas", [1, 2, 78, 132, 264, 396, 528])
def test_cta_groups_take_the_units_evenly_and_leave_few_ctas_idle(ctas: int) -> None:
    for units in range(1, 140):
        groups = cta_group_count(units, ctas)
        assert units % groups == 0
        assert ctas % groups <= ctas / 32
    assert cta_group_count(8, 132) == 8
    assert cta_group_count(8, 528) == 8


# ---- utils


def test_fp4_tensors_are_checked() -> None:
    data, scale = torch.zeros(200, 4, dtype=torch.uint8), torch.zeros(256, 1).to(E4M3)
    made = FP4Tensor(data, scale, 56, (200, 7))
    assert (made.data is data, made.scale is scale, made.scale_start_index, made.dtype) == (True, True, 56, "nvfp4")
    for wrong in ({"data": scale}, {"scale": data}, {"scale": scale[:200]}, {"scale_start_index": 57}):
        with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))} must"):
            FP4Tensor(**{"data": data, "scale": scale} | wrong)
    with pytest.raises(ArgumentError, match="original_shape"):
        FP4Tensor(data, scale, 0, (200, 9))


def test_utils() -> None:
    assert get_trtllm_gen_multi_ctas_kv_counter_bytes(3, 5, 2) == 64
    assert get_trtllm_gen_multi_ctas_kv_counter_bytes(1, 1, 132) == 544
    with pytest.raises(ArgumentTypeError, match="num_qo_heads must be an int"):
        get_trtllm_gen_multi_ctas_kv_counter_bytes(1, 1.5, 132)
    assert get_device_sm_count(torch.device("cpu")) == 0
    assert not utils.device_support_pdl(torch.device("cpu"))
    with pytest.raises(ArgumentError, match="device must be a cuda device"):
        utils.get_compute_capability(torch.device("cpu"))
    with pytest.raises(ArgumentError, match="device must be a cpu or cuda device"):
        get_device_sm_count(torch.device("meta"))
