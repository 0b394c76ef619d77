"""What callers and FlashInfer's own tests match on: types and words of errors, and calls that must not be errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cute_attn
from tests.support.engine_case import BF16, Batch, Graph, Tokens, assert_close, nvfp4_pages, workspace

SCALE = 0.11
ROWS = Batch((3,), (3,), page_size=4)


def planned_decode(tokens: Tokens, layout: str = "NHD", **changes: Any) -> Any:
    batch = tokens.batch
    wrapper = cute_attn.BatchDecodeWithPagedKVCacheWrapper(workspace(tokens.device), layout)
    options = {"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype, "sm_scale": SCALE, **changes}
    where = (tokens.kv_indptr, tokens.kv_indices, tokens.last_page_len)
    wrapper.plan(*where, *batch.heads, batch.dim, batch.page_size, **options)
    return wrapper


# ---- NVFP4 appends


def append(tokens: Tokens, by_slots: bool, k_scale: Any, v_scale: Any, slots: Any = None) -> Any:
    """Append three tokens to an empty cache; returns it."""
    device = tokens.device
    data, scales = nvfp4_pages(tokens.batch, 3, "NHD", device)
    if by_slots:
        slots = torch.tensor([0, 1, 2] if slots is None else slots, device=device)
        cute_attn.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *tokens.ragged(), slots, data, scales, k_scale, v_scale
        )
    else:
        index = torch.arange(3, dtype=torch.int32, device=device)
        where = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0], [0, 1], [3]))
        cute_attn.nvfp4_quantize_append_paged_kv_cache(
            *tokens.ragged(), torch.zeros_like(index), index, data, scales, *where, k_scale, v_scale
        )
    return data, scales


@pytest.mark.parametrize("by_slots", [False, True], ids=["pages", "slots"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_scales_that_are_none(by_slots: bool, bad: float, tensor: bool, device: str) -> None:
    tokens = Tokens(ROWS, device)
    value = torch.tensor([bad]) if tensor else bad
    for scales in ((value, 1.0), (1.0, value)):
        with pytest.raises(ValueError, match="positive finite global decode scale"):
            append(tokens, by_slots, *scales)


@pytest.mark.parametrize("by_slots", [False, True], ids=["pages", "slots"])
def test_scales_may_be_numbers_or_tensors_on_the_cpu(by_slots: bool, device: str) -> None:
    tokens = Tokens(ROWS, device)
    (k, _), _ = append(tokens, by_slots, 0.002, 0.003)
    (other, _), _ = append(tokens, by_slots, torch.tensor(0.002), torch.tensor([0.003]))
    assert k.any()
    assert torch.equal(k, other)


def test_a_captured_append_needs_its_scales_on_the_device(device: str) -> None:
    """A number would be a temporary tensor, which a replay would read after its time."""
    tokens = Tokens(ROWS, device)
    rows, slots = tokens.ragged(), torch.arange(3, device=device)
    data, scales = nvfp4_pages(ROWS, 3, "NHD", device)
    factors = torch.tensor(0.002, device=device), torch.tensor(0.003, device=device)
    function = cute_attn.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    graph = Graph(device, lambda: function(*rows, slots, data, scales, *factors))
    if device == "cuda":
        with pytest.raises(ValueError, match="k_scale"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            function(*rows, slots, data, scales, 0.002, factors[1])
        torch.cuda.synchronize()
    for part in data:
        part.zero_()
    graph.replay()
    assert data[0].any()


# ---- caches


def test_scale_pages_without_unit_stride(device: str) -> None:
    tokens = Tokens(Batch((1, 1), (9, 6)), device)
    data, scales = nvfp4_pages(tokens.batch, tokens.num_pages, "NHD", device)
    wrapper = planned_decode(tokens, kv_data_type=torch.uint8)
    bad = [torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=torch.uint8, device=device)[..., ::2] for x in scales]
    with pytest.raises(Exception, match="innermost stride must be 1"):
        wrapper.run(tokens.q, data, kv_cache_sf=tuple(bad))


def test_k_and_v_may_have_strides_of_their_own(device: str) -> None:
    """FlashInfer's decode says that they "must have identical strides"; here nothing needs that."""
    tokens = Tokens(Batch((1, 1), (33, 70)), device)
    k, v = tokens.caches()
    apart = torch.full((len(v), 20, 2, 128), math.nan, dtype=BF16, device=device)[:, :16]
    apart.copy_(v)
    assert k.stride() != apart.stride()
    assert_close(planned_decode(tokens).run(tokens.q, (k, apart)), tokens.expected(SCALE)[0])


# ---- query lengths of decode
