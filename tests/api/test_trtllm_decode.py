"""`trtllm_batch_decode_with_kv_cache`, the callable `cute_attn.xqa` and helpers of `flashinfer.utils` on the CPU."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch

import cute_attn.xqa
from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    FP4Tensor,
    NotSupported,
    get_device_sm_count,
    get_trtllm_gen_multi_ctas_kv_counter_bytes,
    trtllm_batch_decode_with_kv_cache,
    utils,
    xqa,
)
from tests.support.xqa_case import Built, XqaCase, build

CASE = XqaCase((5, 40), heads=(4, 2), head_dim=64, kv_layout="HND")


def arguments(built: Built) -> dict[str, Any]:
    return {k: v for k, v in built.arguments.items() if k not in ("q_cu_seq_lens", "return_lse")}


def call(built: Built, **changes: Any) -> Any:
    return trtllm_batch_decode_with_kv_cache(**arguments(built) | changes)


def test_keywords_that_ask_for_nothing() -> None:
    built = build(CASE)
    expected = call(built)
    assert built.check(expected, None) == ""
    for changes in (
        {"skip_softmax_threshold_scale_factor": None, "multi_ctas_kv_counter_buffer": None},
        {"skip_softmax_threshold_scale_factor": 0.0},
        {"multi_ctas_kv_counter_buffer": torch.zeros(64, dtype=torch.uint8), "enable_block_sparse_attention": False},
        {"cp_world": 1, "cp_rank": 0, "causal_seqlens_kv_global": None, "request_order": None},
        {"bf16q_fp8kv_transform_mode": "k_only"},
        {"backend": "xqa", "o_sf_scale": None},
        {"backend": "trtllm-gen", "uniform_q_len": 1},
        {"backend": "reference", "out_dtype": "bfloat16"},
        {"sinks": None, "uses_shared_paged_kv_idx": True},
    ):
        assert torch.equal(call(built, **changes), expected), changes


def test_the_base_2_scale() -> None:
    """It replaces bmm1_scale, as a tensor that the kernel reads."""
    built = build(CASE)
    scale = torch.tensor([CASE.scale / math.log(2)])
    assert built.check(call(built, bmm1_scale=7.0, bmm1_scale_log2=scale), None) == ""


def test_layouts_of_the_lse() -> None:
    built = build(dataclasses.replace(CASE, q_len=3))
    out, lse = call(built, return_lse=True)
    given = torch.empty(4, 6)
    _, columns = call(built, return_lse=True, lse_layout="HN", lse=given)
    assert columns is given
    assert torch.equal(columns, lse.t())
    assert torch.equal(call(built, return_lse=True, lse_layout="HN")[1], lse.t())
    assert torch.equal(call(built, lse_layout="HN"), out)
    with pytest.raises(ArgumentError, match=r"lse must have shape \[num_qo_heads, num_tokens\]"):
        call(built, lse_layout="HN", lse=torch.empty(6, 4))


def test_values_in_pages_of_their_own() -> None:
    """The same pages, a constant number of pages away in either direction, or refused."""
    built = build(CASE)
    table, (k, v) = built.arguments["block_tables"], built.arguments["kv_cache"]
    expected, pages = call(built), k.shape[0]
    both = {"uses_shared_paged_kv_idx": False}
    same = table[:, None].expand(-1, 2, -1)
    assert torch.equal(call(built, **both, block_tables=same), expected)
    assert torch.equal(call(built, **both, block_tables=same.contiguous()), expected)
    pool = torch.cat((k, v))
    behind = torch.stack((table, table + pages), 1)
    assert torch.equal(call(built, **both, kv_cache=(pool, pool), block_tables=behind), expected)
    pool = torch.cat((v, k))
    before = torch.stack((table + pages, table), 1)
    assert torch.equal(call(built, **both, kv_cache=(pool, pool), block_tables=before), expected)
    other = same.contiguous()
    other[1, 1, 0] += 1
    with pytest.raises(NotSupported, match=r"different distances.*one page table"):
        call(built, **both, block_tables=other)
    with pytest.raises(ArgumentError, match=r"block_tables must have shape \[batch_size, 2, max_pages\]"):
        call(built, **both)
    with pytest.raises(ArgumentError, match="beyond the cache"):
        call(built, **both, block_tables=torch.stack((table, table + 100), 1))
    with pytest.raises(ArgumentError, match="seq_lens must have one length for each of the 1 rows of block_tables"):
        call(built, **both, block_tables=same[:1].contiguous())
    with pytest.raises(ArgumentError, match=r"seq_lens must be on .* cpu.*, got .* on meta"):
        call(built, **both, block_tables=same.contiguous(), seq_lens=built.arguments["seq_lens"].to("meta"))


def test_fp4_tensors_are_checked() -> None:
    data, scale = torch.zeros(200, 4, dtype=torch.uint8), torch.zeros(256, 1).to(torch.float8_e4m3fn)
    made = FP4Tensor(data, scale, 56, (200, 7))
    assert (made.data is data, made.scale is scale, made.scale_start_index, made.dtype) == (True, True, 56, "nvfp4")
    for wrong in ({"data": scale}, {"scale": data}, {"scale": scale[:200]}, {"scale_start_index": 57}):
        with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))} must"):
            FP4Tensor(**{"data": data, "scale": scale} | wrong)
    with pytest.raises(ArgumentError, match="original_shape"):
        FP4Tensor(data, scale, 0, (200, 9))


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


# ---- utils


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
