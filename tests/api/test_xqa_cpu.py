"""The decode functions on CPU tensors: numbers against numpy, forms of arguments, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_attn import (
    ArgumentError,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from cute_attn.kernels.xqa.host.variant import cta_group_count
from cute_attn.xqa import xqa
from tests.support.xqa_case import Built, XqaCase, build, random_case

CASE = XqaCase((5, 40), heads=(4, 2), head_dim=64)


def call(built: Built, **changes: Any) -> Any:
    return xqa_batch_decode_with_kv_cache(**(built.arguments | {"return_lse": False} | changes))


@pytest.mark.parametrize("seed", range(40))
def test_random(seed: int) -> None:
    built = build(random_case(seed, longest=200))
    out, lse = xqa_batch_decode_with_kv_cache(**built.arguments)
    assert built.check(out, lse) == ""


def test_shapes_of_results() -> None:
    assert call(build(CASE)).shape == (2, 4, 64)
    several = build(dataclasses.replace(CASE, q_len=3))
    assert call(several).shape == (2, 3, 4, 64)
    assert call(several, out=torch.empty(6, 4, 64, dtype=torch.bfloat16)).shape == (6, 4, 64)
    four = torch.empty(2, 3, 4, 64, dtype=torch.bfloat16)
    assert call(several, out=four) is four
    assert several.check(four, None) == ""
    assert call(build(dataclasses.replace(CASE, q_len=3, q_lens=(0, 3)))).shape == (3, 4, 64)
    assert call(build(dataclasses.replace(CASE, seq_lens=()))).shape == (0, 4, 64)


def test_forms_of_arguments_do_not_matter() -> None:
    built = build(dataclasses.replace(CASE, sinks=True))
    expected = call(built)
    k, v = built.arguments["kv_cache"]
    sinks = built.arguments["sinks"]
    for changes in (
        {"kv_cache": [k, v]},
        {"kv_cache": torch.stack((k, v), 1)},
        {"seq_lens": built.arguments["seq_lens"].to(torch.uint32)},
        {"seq_lens": built.arguments["seq_lens"][:, None]},
        {"block_tables": torch.stack((built.arguments["block_tables"],) * 2, -1)[..., 0]},
        {"q_len_per_req": None, "o_scale": None},
        {"sinks": sinks.reshape(2, 2), "bmm1_scale": torch.tensor(64**-0.5, dtype=torch.float64)},
        {"query": torch.cat((built.arguments["query"],) * 2, -1)[..., :64]},
        {"workspace_buffer": built.arguments["workspace_buffer"].view(torch.int32)},
    ):
        assert torch.equal(call(built, **changes), expected), changes


def test_one_axis_is_both_keys_and_values() -> None:
    built = build(CASE)
    k, _ = built.arguments["kv_cache"]
    assert torch.equal(call(built, kv_cache=k[:, None]), call(built, kv_cache=(k, k)))


def test_the_output_scale_is_for_fp8_alone() -> None:
    """bmm2_scale * o_scale is the scale of v: a 16-bit out has it whole, an fp8 out is divided by o_scale."""
    built = build(CASE)
    plain = call(built).double()
    doubled = call(built, o_scale=2.0).double()
    torch.testing.assert_close(doubled, plain * 2, rtol=1e-2, atol=1e-3)
    narrow = call(built, o_scale=2.0, out=torch.empty(2, 4, 64, dtype=torch.float8_e4m3fn)).double()
    torch.testing.assert_close(narrow, plain, rtol=7e-2, atol=2e-3)


def test_trtllm_name() -> None:
    built = build(dataclasses.replace(CASE, kv_layout="HND", q_len=2))
    arguments = {k: v for k, v in built.arguments.items() if k not in ("kv_layout", "q_cu_seq_lens")}
    out, lse = trtllm_batch_decode_with_kv_cache(**arguments)
    assert out.shape == (4, 4, 64)
    assert built.check(out, lse) == ""
    ragged = build(dataclasses.replace(CASE, kv_layout="HND", q_len=3, q_lens=(3, 1)))
    arguments = {k: v for k, v in ragged.arguments.items() if k not in ("kv_layout", "q_cu_seq_lens", "q_len_per_req")}
    bounds = ragged.arguments["q_cu_seq_lens"]
    assert ragged.check(*trtllm_batch_decode_with_kv_cache(**arguments, max_q_len=3, cum_seq_lens_q=bounds)) == ""


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
    a = built.arguments
    output = torch.zeros_like(a["query"])
    scratch, half = torch.empty(0, dtype=torch.uint8), torch.float16
    xqa(
        a["query"], *a["kv_cache"], a["block_tables"], a["seq_lens"], output, scratch, scratch, 2, 16,
        q_scale=torch.tensor(2.0**-10, dtype=half), kv_scale=torch.tensor([2048.0], dtype=half), rcp_out_scale=64.0,
    )  # fmt: skip
    assert built.check(output, None) == ""


def test_a_window_beyond_all_keys_is_none() -> None:
    built = build(CASE)
    assert torch.equal(call(built, window_left=10**30), call(built))


def test_an_fp8_output_saturates() -> None:
    built = build(CASE)
    out = call(built, bmm2_scale=1e6, out=torch.empty(2, 4, 64, dtype=torch.float8_e4m3fn)).float()
    assert out.isfinite().all()
    assert out.abs().max() == 448


@pytest.mark.parametrize("ctas", [1, 2, 78, 132, 264, 396, 528])
def test_cta_groups_take_the_units_evenly_and_leave_few_ctas_idle(ctas: int) -> None:
    for units in range(1, 140):
        groups = cta_group_count(units, ctas)
        assert units % groups == 0
        assert ctas % groups <= ctas / 32
    assert cta_group_count(8, 132) == 8
    assert cta_group_count(8, 528) == 8
