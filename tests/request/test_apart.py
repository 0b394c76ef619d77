"""Which tensors share memory; those that only alternate in it do not. All calls: `tests/api/test_shared_memory.py`."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch

from cute_attn import (
    ArgumentError,
    append_paged_kv_cache,
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


def test_keys_and_values_that_alternate() -> None:
    for axis in (1, 2, 3):
        cache = torch.zeros(4, 4, 2, 16).unsqueeze(axis).repeat_interleave(2, axis)
        k, v = cache.unbind(axis)
        append_paged_kv_cache(ROWS, 2 * ROWS, *TABLE, (k, v), *PAGES)
        assert torch.equal(k[0, 1], ROWS[0])
        assert torch.equal(v[0, 1], 2 * ROWS[0])
