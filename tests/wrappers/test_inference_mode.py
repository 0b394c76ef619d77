"""Calls first in torch's inference mode and then outside: what they keep can be written in both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cute_attn
from cute_attn.integrations.distributed.partials import Partials
from cute_attn.integrations.distributed.ranks import Ranks
from cute_attn.integrations.sglang.metadata import PageTables
from cute_attn.integrations.sglang.tables import GraphTables
from cute_attn.runtime import counters
from cute_attn.runtime.staging import Staging
from tests.support.dense_attention import assert_near, attention, random

CPU = torch.device("cpu")


def test_prefill_without_a_plan() -> None:
    """The page numbers of a kept plan are read again by every call."""
    q, k, v = random(5, 4, 64), random(32, 2, 64, seed=1), random(32, 2, 64, seed=2)
    cache = tuple(x.view(2, 16, 2, 64).transpose(1, 2).contiguous() for x in (k, v))
    table, lengths, bounds, rows = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1]], [32], [0, 32], [0, 5]))
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    expected = attention(q, k, v, torch.ones(5, 32, dtype=torch.bool).tril(27))
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            out = cute_attn.trtllm_batch_context_with_kv_cache(
                *(q, cache, workspace, table, lengths, 5, 32, 0.125, 1.0, 1, rows, bounds)
            )
        assert_near(out, None, expected)


def staging() -> list[torch.Tensor]:
    made = Staging(CPU)
    return [made.memory, made.scratch, *made.written_on_device(8, 8, "layout")]


def fixed_staging() -> list[torch.Tensor]:
    made = Staging(CPU)
    made.fix_capacity(8)
    return [made.memory]


def tile_counters() -> list[torch.Tensor]:
    return [counters.CpuCounters(counters.TILE_COUNTERS).memory]


def partials() -> list[torch.Tensor]:
    made = Partials((2, 2, 64), torch.bfloat16, Ranks(None, 0, 2), CPU)
    return [x for x in vars(made).values() if isinstance(x, torch.Tensor)]


def graph_tables() -> list[torch.Tensor]:
    rows = torch.arange(32, dtype=torch.int32).view(2, 16)
    made = GraphTables(2, PageTables(rows, 4), PageTables(rows, 4), CPU)
    return [*(x for x in made.view(2, 3, with_mask=True) if isinstance(x, torch.Tensor))]


@pytest.mark.parametrize("make_memory", [staging, fixed_staging, tile_counters, partials, graph_tables])
def test_memory_that_is_kept(make_memory: Callable[[], list[torch.Tensor]]) -> None:
    with torch.inference_mode():
        kept = make_memory()
    assert kept
    for memory in kept:
        memory.zero_()
