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


@pytest.mark.parametrize("module", ["prefill", "decode"])
def test_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"cute_attn.{module}"))
    assert result.attempted
    assert not result.failed


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


# ---- the positional order of prefill


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


def test_import_needs_no_dsl() -> None:
    code = "import sys, cute_attn, cute_attn.kernels.fa2.host.variant; print('cutlass' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
