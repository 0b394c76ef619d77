"""The host code of emulated calls: threads, and queries whose rows are not aligned."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import emulator
from tests.support.batch_case import call, decode, heads, make, paged, plan_arguments, wrapper
from tests.support.dense_attention import assert_near, attention, random
from tests.support.right import assert_right

pytestmark = pytest.mark.emulator

PERSISTENT = [("sm_90a", "fa3"), ("sm_100a", "fa4")]
PAGED = paged((5, 7), (20, 13), page_size=16, mask="causal", **heads(4, 2))
DECODE = decode((20, 13), page_size=16, **heads(4, 2))


def test_threads_take_turns() -> None:
    """Tile counters are shared: launches of two threads must not be emulated at the same time."""
    q, k, v = (random(n, h, 64, seed=n + h) for n, h in ((300, 4), (300, 2), (300, 2)))

    def work(_: int) -> Any:
        with emulator.using("sm_90a", kernels="fa3"):
            return cute_attn.single_prefill_with_kv_cache(q, k, v, causal=True, backend="emulator", return_lse=True)

    expected = attention(q, k, v, torch.ones(300, 300, dtype=torch.bool).tril())
    with ThreadPoolExecutor(2) as pool:
        for out, lse in pool.map(work, range(8)):
            assert_near(out, lse, expected)


@pytest.mark.parametrize("target", [("sm_90a", "fa2"), *PERSISTENT], ids=lambda target: target[1])
@pytest.mark.parametrize("case", [PAGED, DECODE], ids=["paged", "decode"])
def test_repeated_runs_copy_a_query_that_is_not_aligned(case: Any, target: tuple[str, str]) -> None:
    """The first run that is not aligned is prepared for repeats; so is one that is."""
    inputs = make(case)
    behind = torch.empty(inputs.q.numel() + 3, dtype=inputs.q.dtype)[3:].view_as(inputs.q).copy_(inputs.q)
    moved = dataclasses.replace(inputs, q=behind)
    for order in ([moved, moved, inputs], [inputs, moved]):
        with emulator.using(target[0], kernels=target[1], sms=2):
            planned = wrapper(case, backend="emulator")
            planned.plan(**plan_arguments(case, inputs))
            for now in order:
                assert_right(case, inputs, *call(case, now, planned))
