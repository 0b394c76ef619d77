"""Tensors whose memory does not hold their values are refused by name: sparse ones, negative and conjugate views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.errors import ArgumentError

INT = torch.int32


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def prefill() -> dict[str, Any]:
    mask = torch.ones(5, 9, dtype=torch.bool)
    return {
        "q": half(5, 4, 64),
        "k": half(9, 2, 64),
        "v": half(9, 2, 64),
        "out": half(5, 4, 64),
        "custom_mask": mask,
        "lse": torch.zeros(5, 4),
        "sinks": torch.zeros(4),
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
    }


def decode() -> dict[str, Any]:
    return {"q": half(4, 64), "k": half(9, 2, 64), "v": half(9, 2, 64), "q_scale": torch.ones(1)}


def merge() -> dict[str, Any]:
    v, s = torch.randn(5, 4, 64), torch.randn(5, 4)
    return {"v_a": v, "s_a": s, "v_b": v.clone(), "s_b": s.clone()}


def merge_in_place() -> dict[str, Any]:
    v, s = torch.randn(5, 4, 64), torch.randn(5, 4)
    return {"v": v, "s": s, "v_other": v.clone(), "s_other": s.clone(), "mask": torch.ones(5, dtype=torch.bool)}


def merge_many() -> dict[str, Any]:
    return {"v": torch.randn(5, 3, 4, 64), "s": torch.randn(5, 3, 4)}


def append() -> dict[str, Any]:
    return {
        "append_key": half(3, 2, 64),
        "append_value": half(3, 2, 64),
        "batch_indices": torch.zeros(3, dtype=INT),
        "positions": torch.arange(3, dtype=INT),
        "paged_kv_cache": half(1, 2, 4, 2, 64),
        "kv_indices": torch.zeros(1, dtype=INT),
        "kv_indptr": torch.tensor([0, 1], dtype=INT),
        "kv_last_page_len": torch.tensor([3], dtype=INT),
    }


def quantise() -> dict[str, Any]:
    return {"input": half(4, 64), "global_scale": torch.ones(1)}


def dequantise() -> dict[str, Any]:
    scales = torch.zeros(4, 4, dtype=torch.uint8)
    return {"fp4_data": torch.zeros(4, 32, dtype=torch.uint8), "block_scales": scales, "global_scale": torch.ones(1)}


def quantise_cache() -> dict[str, Any]:
    return {"k_cache": half(2, 4, 2, 64), "v_cache": half(2, 4, 2, 64)}


CALLS: list[tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = [
    (cute_attn.single_prefill_with_kv_cache, prefill),
    (cute_attn.single_decode_with_kv_cache, decode),
    (cute_attn.merge_state, merge),
    (cute_attn.merge_state_in_place, merge_in_place),
    (cute_attn.merge_states, merge_many),
    (cute_attn.append_paged_kv_cache, append),
    (cute_attn.nvfp4_kv_quantize, quantise),
    (cute_attn.nvfp4_kv_dequantize, dequantise),
    (cute_attn.nvfp4_quantize_paged_kv_cache, quantise_cache),
    (cute_attn.fp8_quantize_paged_kv_cache, quantise_cache),
]
CASES = [
    pytest.param(function, make, name, id=f"{function.__name__}-{name}") for function, make in CALLS for name in make()
]


@pytest.mark.parametrize(("function", "make", "name"), CASES)
def test_memory_that_is_not_the_values_is_refused(
    function: Callable[..., Any], make: Callable[[], dict[str, Any]], name: str
) -> None:
    function(**make())
    given = make()
    views = {"a strided tensor": given[name].to_sparse()}
    if given[name].dtype.is_floating_point:
        views["a negative view"] = torch._neg_view(given[name])
    for message, view in views.items():
        with pytest.raises(ArgumentError, match=rf"{name}\b.* must.* be {message}"):
            function(**{**given, name: view})


def test_imaginary_part_of_a_conjugate_view_is_refused() -> None:
    given = prefill()
    given["k"] = torch.complex(given["k"].float(), given["k"].float()).conj().imag
    with pytest.raises(ArgumentError, match="k must not be a negative view"):
        cute_attn.single_prefill_with_kv_cache(**given)
