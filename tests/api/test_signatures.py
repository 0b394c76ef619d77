"""FlashInfer's calls of single requests and of batches: import locations, names, the positional order, and what is
refused. Positions of all: `test_flashinfer_keywords`.
"""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_attn import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from cute_attn.errors import ArgumentTypeError
from tests.support.entry_points import ENTRIES, Planned, zeros

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def qkv() -> Tensors:
    torch.manual_seed(0)
    return torch.randn(3, 4, 16).half(), torch.randn(7, 2, 16).half(), torch.randn(7, 2, 16).half()


@pytest.mark.parametrize("module", ["prefill", "decode"])
def test_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"cute_attn.{module}"))
    assert result.attempted
    assert not result.failed


def test_lse_alone_is_filled_but_not_returned(qkv: Tensors) -> None:
    lse = torch.full((3, 4), torch.nan)
    out = single_prefill_with_kv_cache(*qkv, lse=lse)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(lse, single_prefill_with_kv_cache_return_lse(*qkv)[1])


# ---- the positional order of prefill


BOOL = torch.ones(3, 7, dtype=torch.bool)
BYTES = torch.ones(3, dtype=torch.uint8)


@pytest.mark.parametrize("function", [single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse])
@pytest.mark.parametrize("extra", [(BOOL,), (None, BYTES), (None, None, True), (None, None, False)], ids=range(4))
def test_the_order_of_older_releases_is_refused(extra: Any, function: Callable[..., Any], qkv: Tensors) -> None:
    name = f"scale_{'qkv'[len(extra) - 1]}"
    with pytest.raises(ArgumentTypeError, match=f"{name} must be a floating-point tensor, got ") as error:
        function(*qkv, *extra)
    assert "scale_q, scale_k, scale_v, o_dtype, custom_mask" in str(error.value)
    assert "custom_mask, packed_custom_mask, causal, kv_layout" in str(error.value)


# ---- renamed arguments, hints


@pytest.mark.parametrize("function", [single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse])
def test_the_older_name_of_the_fp16_hint(function: Callable[..., Any], qkv: Tensors) -> None:
    """It changes nothing and takes flags only, in repeated calls too, of which others would be replayed."""
    plain = function(*qkv, return_lse=False)
    for older in (False, True, True, True):
        assert torch.equal(function(*qkv, return_lse=False, allow_fp16_qk_reduction=older), plain)
        with pytest.raises(TypeError, match="allow_fp16_qk_reduction and use_fp16_qk_reduction"):
            function(*qkv, allow_fp16_qk_reduction=older, use_fp16_qk_reduction=True)
    with pytest.raises(ArgumentTypeError, match="allow_fp16_qk_reduction must be True or False, got 1"):
        function(*qkv, allow_fp16_qk_reduction=1)


# ---- plans of batches


MASK = torch.ones(92, dtype=torch.bool)


def begun(kind: str) -> tuple[Any, dict[str, Any]]:
    """A wrapper, and its plan but for dtypes: what has no default, in the order of positions."""
    call = ENTRIES[kind].begin(ENTRIES[kind].tensors)
    assert isinstance(call, Planned)
    return call.made, {name: x for name, x in call.planned.items() if name != "q_data_type"}


def planned(kind: str, *args: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A wrapper with a plan, and tensors for its runs."""
    (made, plan), dtype = begun(kind), options.get("q_data_type", torch.float16)
    made.plan(*plan.values(), *args, **options)
    q, *kv = (ENTRIES[kind].tensors[name].to(dtype) for name in "qkv")
    return made, [q, *kv] if kind == "ragged" else [q, tuple(kv)]


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_renamed_keywords(kind: str) -> None:
    made, plan = begun(kind)
    where = {"head_dim" if name == "head_dim_qk" else name: value for name, value in plan.items()}
    type(made)(zeros(1 << 16), qk_indptr_buf=None)
    made.plan(**where, allow_fp16_qk_reduction=True, causal=True)
    assert made._planned().settings == planned(kind, causal=True)[0]._planned().settings
    with pytest.raises(ArgumentTypeError, match="two names of one argument"):
        made.plan(**where, allow_fp16_qk_reduction=True, use_fp16_qk_reduction=True)


OLDER_PLANS: list[tuple[tuple[Any, ...], str]] = [
    ((MASK,), "head_dim_vo must be an int, got a bool tensor"),
    ((None, None, True), "packed_custom_mask must be a torch.Tensor, got True"),
    ((None, None, False, "ALIBI"), "causal must be True or False, got 'ALIBI'"),
]


@pytest.mark.parametrize("kind", ["paged", "ragged"])
@pytest.mark.parametrize(("positional", "message"), OLDER_PLANS, ids=range(len(OLDER_PLANS)))
def test_the_order_of_older_plans_is_refused(kind: str, positional: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message) as error:
        planned(kind, *positional)
    assert "head_dim_vo, custom_mask, packed_custom_mask, causal" in str(error.value)
    assert "releases custom_mask, packed_custom_mask, causal, pos_encoding_mode" in str(error.value)


# ---- runs of batches


def test_o_scale_of_ragged() -> None:
    made, tensors = planned("ragged")
    assert all(map(torch.equal, made.run_return_lse(*tensors), made.run(*tensors, return_lse=True)))
    half = made.run(*tensors, o_scale=2.0)
    torch.testing.assert_close(half * 2, made.run(*tensors), rtol=1e-3, atol=1e-3)
    quarter = made.run(*tensors, o_scale=2.0, v_scale=torch.tensor(0.5))
    torch.testing.assert_close(quarter * 4, made.run(*tensors), rtol=1e-3, atol=1e-3)


def test_o_scale_divides_a_narrow_v_scale_in_fp32() -> None:
    made, tensors = planned("ragged", o_data_type=torch.float32)
    large = made.run(*tensors, o_scale=0.25, v_scale=torch.tensor(2.0**15, dtype=torch.float16))  # 2^17 is inf there
    torch.testing.assert_close(large / 2**17, made.run(*tensors))


BAD_RUNS: list[tuple[str, tuple[Any, ...]]] = [
    ("paged", (0.5,)),
    ("paged", (None, None, True)),
    ("paged", (torch.tensor(0.5), torch.tensor([2.0]), True)),
    ("paged", (torch.tensor(0.5), torch.tensor(2.0), torch.tensor(1.0))),
    ("paged", (zeros(4), zeros(2), zeros(2), 3)),
    ("ragged", (True,)),
    ("decode", (0.5, 2.0)),
]
OLDER_RUNS = {"paged": "k_scale, v_scale, return_lse", "ragged": "return_lse", "decode": "q_scale, k_scale, v_scale"}


@pytest.mark.parametrize(("kind", "positional"), BAD_RUNS, ids=range(len(BAD_RUNS)))
def test_runs_take_head_scales_alone_by_position(kind: str, positional: tuple[Any, ...]) -> None:
    made, tensors = planned(kind)
    with pytest.raises(ArgumentTypeError, match="must be scale_q, scale_k, scale_v of fp8 attention") as error:
        made.run(*tensors, *positional)
    assert f"older releases {OLDER_RUNS[kind]}): pass all other arguments by keyword" in str(error.value)


def test_head_scales_of_decode() -> None:
    made, tensors = planned("decode", q_data_type=torch.float8_e4m3fn)
    scaled = made.run(*tensors, torch.ones(4), torch.full((2,), 2.0), torch.ones(2))
    assert scaled.dtype == torch.bfloat16
    assert torch.equal(scaled, made.run(*tensors, k_scale=2.0))
