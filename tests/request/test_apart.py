"""Outputs of one call that share memory with each other are refused; those that only alternate in it are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from cute_attn import (
    ArgumentError,
    append_paged_kv_cache,
    get_batch_indices_positions,
    merge_state_in_place,
    nvfp4_kv_dequantize_paged,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from cute_attn.request import checks

ROWS = torch.randn(2, 2, 16)


def ints(*values: int) -> torch.Tensor:
    """Returns int32."""
    return torch.tensor(values, dtype=torch.int32)


TABLE = ints(0, 1), ints(1, 0)
PAGES = ints(0, 1, 2), ints(0, 2, 3), ints(3, 2)


def bytes_of(memory: torch.Tensor, x: torch.Tensor) -> set[int]:
    """Returns the bytes of memory that a view of it covers."""
    memory.zero_()
    x.fill_(-1)
    return set(memory.view(torch.uint8).nonzero().flatten().tolist())


def test_shared_bytes_are_found() -> None:
    choose, memory, shared = random.Random(0), torch.zeros(400, dtype=torch.int16), [0, 0]
    for _ in range(400):
        page, token = choose.choice([(64, 16), (64, 8), (40, 8), (16, 64)]), choose.choice([1, 3, 4])
        x, y = (
            memory.as_strided((choose.randint(1, 3), choose.randint(1, 2), width), (*page, 1), choose.randint(0, 90))
            for width in (token, choose.choice([token, 4]))
        )
        meet = bool(bytes_of(memory, x) & bytes_of(memory, y))
        shared[meet] += 1
        with pytest.raises(ArgumentError, match="y must not share memory with x") if meet else nullcontext():
            checks.apart((("x", x), ("y", y)))
    assert min(shared) > 50


def nvfp4() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns caches of codes and of block scales."""
    return torch.zeros(4, 4, 2, 8, dtype=torch.uint8), torch.zeros(4, 4, 2, 1, dtype=torch.uint8)


def append_into_one_cache() -> None:
    cache = torch.zeros(4, 4, 2, 16)
    append_paged_kv_cache(ROWS, ROWS, *TABLE, (cache, cache), *PAGES)


def append_into_crossing_caches() -> None:
    memory = torch.zeros(5, 4, 2, 16)
    append_paged_kv_cache(ROWS, ROWS, *TABLE, (memory[:4], memory[1:]), *PAGES)


def append_nvfp4() -> None:
    codes, scales = nvfp4()
    nvfp4_quantize_append_paged_kv_cache(ROWS, ROWS, *TABLE, (codes, codes.clone()), (scales, scales), *PAGES, 1.0, 1.0)


def append_nvfp4_by_slots() -> None:
    codes, scales = nvfp4()
    caches, inside = (codes, codes.clone()), codes.view(-1)[:32].view(4, 4, 2, 1)
    slots = ints(1, 8)
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(ROWS, ROWS, slots, caches, (inside, scales), 1.0, 1.0)


def indices_and_positions() -> None:
    buffer = torch.zeros(3, dtype=torch.int32)
    get_batch_indices_positions(ints(0, 2, 3), ints(5, 9), 3, buffer, buffer)


def dequantize() -> None:
    (codes, scales), one, out = nvfp4(), torch.ones(1), torch.zeros(1, 8, 2, 16)
    pair = (codes, codes), (scales, scales)
    nvfp4_kv_dequantize_paged(*pair, ints(0, 1)[None], ints(6), one, one, out, out, kv_layout="NHD")


def merge() -> None:
    memory = torch.randn(340)
    v, s = memory[:320].view(5, 4, 16), memory[300:320].view(5, 4)
    merge_state_in_place(v, s, v.clone(), s.clone())


@pytest.mark.parametrize(
    "function",
    [
        append_into_one_cache,
        append_into_crossing_caches,
        append_nvfp4,
        append_nvfp4_by_slots,
        indices_and_positions,
        dequantize,
        merge,
    ],
)
def test_refused(function: Callable[[], None]) -> None:
    with pytest.raises(ArgumentError, match="must not share memory with"):
        function()


def test_keys_and_values_that_alternate() -> None:
    for axis in (1, 2, 3):
        cache = torch.zeros(4, 4, 2, 16).unsqueeze(axis).repeat_interleave(2, axis)
        k, v = cache.unbind(axis)
        append_paged_kv_cache(ROWS, 2 * ROWS, *TABLE, (k, v), *PAGES)
        assert torch.equal(k[0, 1], ROWS[0])
        assert torch.equal(v[0, 1], 2 * ROWS[0])
