"""The host code of emulated calls: threads, queries whose rows are not aligned, repeated runs of one plan, and a plan
that renews the schedules of all layers in a captured graph.
"""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import emulator
from tests.support import xqa_batches
from tests.support.batch_case import (
    E4M3,
    BatchCase,
    call,
    decode,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    random_lengths,
    wrapper,
)
from tests.support.dense_attention import assert_near, attention, random
from tests.support.engine_case import workspace
from tests.support.graphs import LAYERS, Captured, CapturedLayers, emulated_graph
from tests.support.right import assert_right, families

pytestmark = pytest.mark.emulator

FA2, PERSISTENT = ("sm_90a", "fa2"), [("sm_90a", "fa3"), ("sm_100a", "fa4")]
RAGGED = ragged((7, 13), (7, 13), mask="causal", dtype="bfloat16", **heads(4, 2))
PAGED = paged((5, 7), (20, 13), page_size=16, mask="causal", **heads(4, 2))
DECODE = decode((20, 13), page_size=16, **heads(4, 2))
LAYERED = [
    paged((2, 3), (20, 9), page_size=4, **heads(4, 2)),
    ragged((2, 3), (20, 9), **heads(4, 2)),
    decode((20, 9), page_size=4, **heads(4, 2)),
]


def test_threads_take_turns() -> None:
    """Tile counters are shared: launches of two threads must not be emulated at the same time."""
    q, k, v = (random(n, h, 64, seed=n + h) for n, h in ((150, 4), (150, 2), (150, 2)))

    def work(_: int) -> Any:
        with emulator.using("sm_90a", kernels="fa3"):
            return cute_attn.single_prefill_with_kv_cache(q, k, v, causal=True, backend="emulator", return_lse=True)

    expected = attention(q, k, v, torch.ones(150, 150, dtype=torch.bool).tril())
    with ThreadPoolExecutor(2) as pool:
        for out, lse in pool.map(work, range(6)):
            assert_near(out, lse, expected)


@pytest.mark.parametrize(
    ("case", "target"),
    [*itertools.product((PAGED, DECODE), (FA2, *PERSISTENT)), (RAGGED, FA2)],
    ids=lambda value: value.kind if isinstance(value, BatchCase) else value[1],
)
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


@pytest.mark.parametrize("case", LAYERED, ids=["paged", "ragged", "decode"])
def test_layers_of_one_plan(case: BatchCase) -> None:
    with emulator.using("sm_90a", kernels="fa2", sms=1):
        captured = CapturedLayers(case, "cpu", emulated_graph, LAYERS[1:3], backend="emulator")
        captured.replay(dataclasses.replace(case, kv_lens=(7, 18), seed=3))


GRAPHED = (
    paged((37, 2, 5, 16), (300,) * 4, page_size=5, kv_layout="HND", mask="causal", **heads(4, 2)),
    paged((13, 5, 9), (70,) * 3, mask="custom", window_left=30),
    ragged((30, 20), (90,) * 2, kv_layout="HND", mask="packed"),
    decode((200,) * 3, q_len=3, page_size=1, fixed_split_size=24, **heads(4, 1)),
    decode((70, 33), kv_dtype=E4M3, cache="halves", **heads(4, 2)),  # rows at multiples of 8 bytes
)


@pytest.mark.parametrize(
    ("kernels", "case"),
    [*itertools.product(["fa2"], GRAPHED), *itertools.product(["xqa"], xqa_batches.GRAPHED)],
    ids=lambda value: getattr(value, "id", value),
)
def test_replays_with_other_lengths(kernels: str, case: BatchCase) -> None:
    with emulator.using("sm_90a", kernels=kernels, sms=4 if kernels == "fa2" else 2) as emulation:
        captured = Captured(case, "cpu", emulated_graph, backend="emulator")
        captured.replay(case)
        for seed in range(2):
            captured.replay(random_lengths(case, seed, max(case.kv_lens)))
    assert set(families(emulation)) <= {kernels, "combine"}


@pytest.mark.parametrize("kernels", ["fa2", "xqa"])
def test_a_plan_of_padding_alone_is_captured(kernels: str) -> None:
    """Engines capture decode before there is a request: no request of the first plan has keys."""
    case = decode((37, 9, 20), page_size=4, **heads(4, 2))
    nobody = dataclasses.replace(case, kv_lens=(0, 0, 0))
    with emulator.using("sm_90a", kernels=kernels, sms=2):
        captured = Captured(case, "cpu", emulated_graph, backend="emulator")
        captured.wrapper.reset_workspace_buffer(workspace("cpu"))  # the next plan is a first one
        captured.wrapper.plan(**plan_arguments(nobody, make(nobody)))
        captured.run()
        captured.results, captured.again = emulated_graph(captured.run)
        for kv_lens in (case.kv_lens, (0, 36, 1)):
            captured.replay(dataclasses.replace(case, kv_lens=kv_lens, seed=sum(kv_lens)))
