"""FlashInfer's calls of single requests: import locations, names, the positional order, and what is refused."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_attn import (
    ArgumentTypeError,
    packbits,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
PREFILL_ORDER = (
    *("scale_q", "scale_k", "scale_v", "o_dtype", "custom_mask", "packed_custom_mask", "causal", "kv_layout"),
    *("pos_encoding_mode", "use_fp16_qk_reduction", "sm_scale", "window_left", "logits_soft_cap", "rope_scale"),
    *("rope_theta", "backend", "return_lse", "kv_cache_sf", "k_scale", "v_scale"),
)


@pytest.fixture
def qkv() -> Tensors:
    torch.manual_seed(0)
    return torch.randn(3, 4, 16).half(), torch.randn(7, 2, 16).half(), torch.randn(7, 2, 16).half()


@pytest.fixture
def mask() -> torch.Tensor:
    return torch.arange(21).reshape(3, 7) % 3 != 0


@pytest.mark.parametrize("module", ["prefill", "decode"])
def test_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"cute_attn.{module}"))
    assert result.attempted
    assert not result.failed


# ---- return values


def test_returns_of_prefill(qkv: Tensors) -> None:
    out, lse = single_prefill_with_kv_cache(*qkv, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((3, 4, 16), (3, 4), torch.float32)
    assert torch.equal(single_prefill_with_kv_cache(*qkv), out)
    out_lse = single_prefill_with_kv_cache_return_lse(*qkv)
    assert torch.equal(out_lse[0], out)
    assert torch.equal(out_lse[1], lse)
    assert torch.equal(single_prefill_with_kv_cache_return_lse(*qkv, return_lse=False), out)


@pytest.mark.parametrize("num_qo_heads", [1, 4])
def test_returns_of_decode(qkv: Tensors, num_qo_heads: int) -> None:
    q, k, v = qkv
    q, k, v = q[0, :num_qo_heads], k[:, :1], v[:, :1]
    out, lse = single_decode_with_kv_cache(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == ((num_qo_heads, 16), (num_qo_heads,))
    assert torch.equal(single_decode_with_kv_cache(q, k, v), out)


def test_buffers_are_returned_themselves(qkv: Tensors) -> None:
    q, k, v = qkv
    out, lse = torch.empty(3, 4, 16).half(), torch.empty(3, 4)
    returned = single_prefill_with_kv_cache(q, k, v, out=out, lse=lse, return_lse=True)
    assert returned[0] is out
    assert returned[1] is lse
    out, lse = torch.empty(4, 16).half(), torch.empty(4)
    returned = single_decode_with_kv_cache(q[0], k, v, out=out, lse=lse, return_lse=True)
    assert returned[0] is out
    assert returned[1] is lse


def test_lse_alone_is_filled_but_not_returned(qkv: Tensors) -> None:
    lse = torch.full((3, 4), torch.nan)
    out = single_prefill_with_kv_cache(*qkv, lse=lse)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(lse, single_prefill_with_kv_cache_return_lse(*qkv)[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_o_dtype(qkv: Tensors, dtype: torch.dtype) -> None:
    assert single_prefill_with_kv_cache(*qkv, o_dtype=dtype).dtype == dtype


# ---- the positional order of prefill


def current_call(qkv: Tensors, **changed: Any) -> Any:
    """Every positional argument."""
    values = dict.fromkeys(PREFILL_ORDER)
    values |= {"causal": False, "kv_layout": "NHD", "pos_encoding_mode": "NONE"}
    values |= {"use_fp16_qk_reduction": False, "window_left": -1, "backend": "auto", "return_lse": False}
    return single_prefill_with_kv_cache(*qkv, *{**values, **changed}.values())


CHANGES: list[dict[str, Any]] = [
    {"causal": True},
    {"pos_encoding_mode": "ALIBI"},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 100.0},
    {"use_fp16_qk_reduction": True},
    {"sm_scale": 0.7},
    {"window_left": 1},
    {"logits_soft_cap": 0.5},
]


@pytest.mark.parametrize("changed", CHANGES, ids=lambda changed: "-".join(changed))
def test_every_slot(changed: dict[str, Any], qkv: Tensors) -> None:
    assert torch.equal(current_call(qkv, **changed), single_prefill_with_kv_cache(*qkv, **changed))


def test_masks_and_layout_by_position(qkv: Tensors, mask: torch.Tensor) -> None:
    q, k, v = qkv
    expected = single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    assert torch.equal(current_call(qkv, custom_mask=mask), expected)
    assert torch.equal(current_call(qkv, packed_custom_mask=packbits(mask.flatten(), "little")), expected)
    hnd = (q, k.transpose(0, 1), v.transpose(0, 1))
    assert torch.equal(current_call(hnd, kv_layout="HND", custom_mask=mask), expected)


def test_scales_and_dtypes_by_position(qkv: Tensors) -> None:
    scales = {"scale_q": torch.rand(4), "scale_k": torch.rand(2), "scale_v": torch.rand(2)}
    expected = single_prefill_with_kv_cache(*qkv, **scales)
    assert torch.equal(current_call(qkv, **scales), expected)
    assert not torch.equal(current_call(qkv), expected)
    assert current_call(qkv, o_dtype=torch.float32).dtype == torch.float32
    assert len(current_call(qkv, return_lse=True)) == 2
    half = single_prefill_with_kv_cache(*qkv, k_scale=0.5, v_scale=2.0)
    assert torch.equal(current_call(qkv, k_scale=0.5, v_scale=2.0), half)
    assert torch.equal(current_call(qkv, backend="reference"), current_call(qkv))


BOOL = torch.ones(3, 7, dtype=torch.bool)
BYTES = torch.ones(3, dtype=torch.uint8)
OLDER: list[tuple[Any, ...]] = [
    (BOOL,),
    (None, BYTES),
    (None, None, True),
    (None, None, False),
    (BOOL, None, False, "NHD", "NONE", False, None, -1, None, None, None),
    (None, None, False, "NHD", "NONE", False, None, -1, None, None, None),
]


@pytest.mark.parametrize("function", [single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse])
@pytest.mark.parametrize("extra", OLDER, ids=range(len(OLDER)))
def test_the_order_of_older_releases_is_refused(extra: Any, function: Callable[..., Any], qkv: Tensors) -> None:
    name = PREFILL_ORDER[next(i for i, value in enumerate(extra) if value is not None)]
    with pytest.raises(ArgumentTypeError, match=f"{name} must be a floating-point tensor, got ") as error:
        function(*qkv, *extra)
    assert "scale_q, scale_k, scale_v, o_dtype, custom_mask" in str(error.value)
    assert "custom_mask, packed_custom_mask, causal, kv_layout" in str(error.value)


def test_too_many_positionals(qkv: Tensors) -> None:
    with pytest.raises(TypeError, match="takes from 3 to 23 positional arguments but 24 were given"):
        single_prefill_with_kv_cache(*qkv, *[None] * 21)


def test_an_argument_given_twice(qkv: Tensors) -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'scale_k'"):
        single_prefill_with_kv_cache(*qkv, None, None, scale_k=torch.ones(2))


def test_return_lse_form_takes_positions(qkv: Tensors, mask: torch.Tensor) -> None:
    expected = single_prefill_with_kv_cache(*qkv, custom_mask=mask, return_lse=True)
    found = single_prefill_with_kv_cache_return_lse(*qkv, None, None, None, None, mask)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_unknown_keyword(qkv: Tensors) -> None:
    with pytest.raises(TypeError, match="casual"):
        single_prefill_with_kv_cache(*qkv, casual=True)  # type: ignore[call-arg]


# ---- renamed arguments, hints


@pytest.mark.parametrize("name", ["allow_fp16_qk_reduction", "use_fp16_qk_reduction"])
@pytest.mark.parametrize("function", [single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse])
def test_both_names_of_the_fp16_hint(function: Callable[..., Any], name: str, qkv: Tensors) -> None:
    plain, hinted = function(*qkv, return_lse=False), function(*qkv, return_lse=False, **{name: True})
    assert torch.equal(plain, hinted)


def test_both_names_at_once_are_refused(qkv: Tensors) -> None:
    for older in (False, True):
        with pytest.raises(TypeError, match="allow_fp16_qk_reduction and use_fp16_qk_reduction"):
            single_prefill_with_kv_cache(*qkv, allow_fp16_qk_reduction=older, use_fp16_qk_reduction=True)


def test_the_older_name_of_the_fp16_hint_takes_flags_only(qkv: Tensors) -> None:
    for _ in range(3):  # repeated calls too, of which others would be replayed
        single_prefill_with_kv_cache(*qkv, allow_fp16_qk_reduction=True)
    with pytest.raises(ArgumentTypeError, match="allow_fp16_qk_reduction must be True or False, got 1"):
        single_prefill_with_kv_cache(*qkv, allow_fp16_qk_reduction=1)  # type: ignore[arg-type]


def test_use_tensor_cores_is_a_hint(qkv: Tensors) -> None:
    q, k, v = qkv
    plain = single_decode_with_kv_cache(q[0], k, v)
    assert torch.equal(single_decode_with_kv_cache(q[0], k, v, use_tensor_cores=True), plain)


def test_every_positional_slot_of_decode(qkv: Tensors) -> None:
    q, (k, v) = qkv[0][0], (x.transpose(0, 1) for x in qkv[1:])
    by_position = single_decode_with_kv_cache(
        q, k, v, "HND", "ROPE_LLAMA", True, 0.5, 2.0, 3.0, 4, 5.0, 0.6, 2.0, 100.0, True
    )
    by_name = single_decode_with_kv_cache(
        q=q,
        k=k,
        v=v,
        kv_layout="HND",
        pos_encoding_mode="ROPE_LLAMA",
        use_tensor_cores=True,
        q_scale=0.5,
        k_scale=2.0,
        v_scale=3.0,
        window_left=4,
        logits_soft_cap=5.0,
        sm_scale=0.6,
        rope_scale=2.0,
        rope_theta=100.0,
        return_lse=True,
    )
    for got, want in zip(by_position, by_name, strict=True):
        assert torch.equal(got, want)


def test_import_needs_no_dsl() -> None:
    code = "import sys, cute_attn, cute_attn.kernels.fa2.host.variant; print('cutlass' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
