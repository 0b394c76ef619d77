"""Tensors whose memory does not hold their values are refused by name: sparse ones, negative and conjugate views."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.errors import ArgumentError
from perf.pretended_gpu import NullDriver
from tests.support.entry_points import ENTRIES, OTHER_NAMES
from tests.support.launch_corpus import pretended


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def merge() -> dict[str, Any]:
    v, s = torch.randn(5, 4, 64), torch.randn(5, 4)
    return {"v_a": v, "s_a": s, "v_b": v.clone(), "s_b": s.clone()}


def merge_many() -> dict[str, Any]:
    return {"v": torch.randn(5, 3, 4, 64), "s": torch.randn(5, 3, 4)}


def quantise() -> dict[str, Any]:
    return {"input": half(4, 64), "global_scale": torch.ones(1)}


def dequantise() -> dict[str, Any]:
    scales = torch.zeros(4, 4, dtype=torch.uint8)
    return {"fp4_data": torch.zeros(4, 32, dtype=torch.uint8), "block_scales": scales, "global_scale": torch.ones(1)}


def quantise_cache() -> dict[str, Any]:
    return {"k_cache": half(2, 4, 2, 64), "v_cache": half(2, 4, 2, 64)}


CALLS: list[tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = [  # those that write new tensors only
    (cute_attn.merge_state, merge),
    (cute_attn.merge_states, merge_many),
    (cute_attn.nvfp4_kv_quantize, quantise),
    (cute_attn.nvfp4_kv_dequantize, dequantise),
    (cute_attn.nvfp4_quantize_paged_kv_cache, quantise_cache),
    (cute_attn.fp8_quantize_paged_kv_cache, quantise_cache),
]


# Of calls, tensors whose layout nobody looks at: those not read, and those that strides or torch refuse before.
ANY_LAYOUT = {
    *(("latent", "out"), ("latent, xqa", "out"), ("trtllm context", "lse"), ("trtllm ragged", "lse")),
    ("trtllm fmha, pages", "cum_seq_lens_kv"),
}


def assert_refused(call: Callable[[dict[str, Any]], Any], given: Mapping[str, torch.Tensor], name: str) -> None:
    """The call names a view of one tensor, or the argument that it is a part of."""
    x, whole = given[name], re.escape(name.split(" of ")[-1].partition("[")[0])
    called = rf"{OTHER_NAMES.get(name, whole)}|([kv](_sf)? of )?(paged_kv_cache|{whole})(\[[01]\])?"
    views = {"a negative view": torch._neg_view(x)} if x.dtype.is_floating_point else {}
    if x.dtype != torch.float8_e4m3fn:  # torch has no sparse ones
        views["a strided tensor"] = x.to_sparse()
    for what, view in views.items():
        with pytest.raises(ArgumentError, match=rf"^({called})( of \w+)? must .*be {what}"):
            call({**given, name: view})


@pytest.mark.parametrize(("function", "make"), CALLS, ids=[function.__name__ for function, _ in CALLS])
def test_functions_without_outputs(function: Callable[..., Any], make: Callable[[], dict[str, Any]]) -> None:
    function(**make())
    for name in make():
        assert_refused(lambda given: function(**given), make(), name)


@pytest.mark.parametrize("entry", ENTRIES)
def test_first_and_repeated_calls(entry: str) -> None:
    with pretended(NullDriver()):
        call, given = ENTRIES[entry].begin(ENTRIES[entry].tensors, "auto"), dict(ENTRIES[entry].tensors)
        for calls in (0, 3):
            for _ in range(calls):
                call(given)
            for name in given.keys() - {*ENTRIES[entry].planned}:
                if (entry, name) not in ANY_LAYOUT:
                    assert_refused(call, given, name)


def test_imaginary_part_of_a_conjugate_view_is_refused() -> None:
    q, k = half(5, 4, 64), half(9, 2, 64)
    conjugate = torch.complex(k.float(), k.float()).conj().imag
    with pytest.raises(ArgumentError, match="k must not be a negative view"):
        cute_attn.single_prefill_with_kv_cache(q, conjugate, k)
