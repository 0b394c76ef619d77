"""Multi-item scoring on the emulator: gaps between prefix and items, splits, captured plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cute_attn import BatchPrefillWithRaggedKVCacheWrapper
from cute_attn.emulator import Schedule, using
from cute_attn.emulator.settings import Emulation
from tests.support import multi_item
from tests.support.batch_case import E4M3, BatchCase, dims, heads, paged, ragged, random_lengths
from tests.support.graphs import graph_wrapper
from tests.support.matrix import BF16
from tests.support.persistent_emulated import TARGETS, name
from tests.support.right import assert_planned_right, emulate, executed, families, launched
from tests.support.schedules import ALL_SCHEDULES, SCHEDULES, in_turn, way_of_keys

pytestmark = pytest.mark.emulator

KERNELS = (("fa2", "sm_90a"), ("fa3", "sm_90a"), ("fa4", "sm_100a"))
GAPS: tuple[BatchCase, ...] = (
    ragged((140, 0, 37, 1), (700, 20, 64, 130), mask="items", **heads(2, 1)),
    paged((130, 9), (600, 200), page_size=64, mask="items", longest_item=40, **BF16, **dims(128)),
    paged((70, 70), (500, 70), page_size=5, mask="items", sinks=True, o_dtype="float32", longest_item=3),
    paged((70, 30), (500, 200), page_size=16, mask="items", window_left=70, logits_soft_cap=3.0, longest_item=50),
    paged((70, 20), (500, 160), page_size=16, mask="items", kv_dtype=E4M3, **dims(128)),
    ragged((70, 20), (400, 160), mask="items", longest_item=300, slack=True, **dims(192, 128)),
    paged((70,), (400,), page_size=16, mask="items", **BF16, **dims(256)),
)


def solve(case: BatchCase, arch: str, kernels: str, schedule: Schedule, sms: int | None = 3) -> Emulation:
    emulation = emulate(case, arch, kernels, schedule, sms)
    attention = [record.spec for record in launched(emulation) if record.spec["kernel"] != "combine"]
    assert [(spec["kernel"], spec["mask"]) for spec in attention] == [(kernels, "multi_item")]
    return emulation


FP8 = ragged((100,), (140,), mask="items", longest_item=30, dtype=E4M3, o_dtype="bfloat16", **heads(2, 2))
PRODUCTS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
CASES = [
    *(("fa2", "sm_120a", FP8, schedule) for schedule in ALL_SCHEDULES),
    *(("fa2", "sm_80" if case is GAPS[0] else "sm_90a", case, schedule) for case, schedule in in_turn(GAPS)),
    *(
        (*target.on, *turn)
        for target in TARGETS
        for turn in in_turn([case for case in GAPS if target.takes(case)], structure=way_of_keys)
    ),
]


@pytest.mark.parametrize(("kernels", "arch", "case", "schedule"), CASES, ids=name)
def test_gaps(kernels: str, arch: str, case: BatchCase, schedule: Schedule) -> None:
    solve(case, arch, kernels, schedule)


@pytest.mark.parametrize(("kernels", "arch"), KERNELS)
@pytest.mark.parametrize("schedule", ALL_SCHEDULES, ids=name)
def test_splits(schedule: Schedule, kernels: str, arch: str) -> None:
    """Several CTAs divide what a query tile sees, or, with a fixed size, some of them find nothing."""
    case = paged((30,), (1800,), page_size=16, mask="items", **heads(2, 1))
    emulation = solve(case, arch, kernels, schedule, sms=16)
    assert families(emulation) == [kernels, "combine"]
    solve(dataclasses.replace(case, qo_lens=(66,), kv_lens=(700,), fixed_split_size=8), arch, kernels, schedule)


@pytest.mark.parametrize(("kernels", "arch"), KERNELS)
def test_hidden_tiles_are_skipped(kernels: str, arch: str) -> None:
    """A custom mask of the same bits gives the same numbers with far more products."""
    kv_len = 1500
    items = multi_item.Items([100], [list(range(20)) * 70], [multi_item.visible(150, kv_len, 100, [*range(20)] * 70)])
    counts, outs = [], []
    for arguments in (items.arguments("cpu"), {"custom_mask": items.keep[0].flatten()}):
        out, emulation = ragged_call(150, kv_len, (kernels, arch), Schedule(), arguments)
        counts.append(executed(emulation, *PRODUCTS))
        outs.append(out)
    torch.testing.assert_close(*outs, rtol=2e-3, atol=2e-3)
    assert counts[0] < counts[1] / 3


def ragged_call(
    qo_len: int,
    kv_len: int,
    on: tuple[str, str],
    schedule: Schedule,
    arguments: dict[str, Any],
    backend: str = "emulator",
) -> tuple[torch.Tensor, Emulation]:
    """One request on (kernels, arch); memory of k and v behind it is NaN."""
    q, k, v = (torch.randn(n, 1, 64, generator=torch.Generator().manual_seed(n)).half() for n in (qo_len, 1600, 1700))
    k[kv_len:], v[kv_len:] = torch.nan, torch.nan
    ends = (torch.tensor([0, n], dtype=torch.int32) for n in (qo_len, kv_len))
    with using(on[1], kernels=on[0], schedule=schedule, sms=2) as emulation:
        made = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 22, dtype=torch.uint8), backend=backend)
        made.plan(*ends, 1, 1, 64, **arguments)
        out, lse = made.run(q, k, v[:1600], return_lse=True)
    return torch.cat((out.float(), lse[..., None]), -1), emulation


EDGES: dict[str, tuple[int, int, int, Sequence[int]]] = {  # qo_len, kv_len, prefix_len, positions
    "delimiters alone": (100, 400, 30, [0] * 370),
    "nothing visible": (140, 400, 0, [0] * 400),
    "last token a delimiter, tiles full": (1, 512, 64, [*range(447), 0]),
    "delimiter at a tile's edge": (130, 514, 0, [*range(384), *range(130)]),
    "prefix at a tile's edge": (70, 640, 128, list(range(32)) * 16),
    "prefix is all": (90, 300, 300, []),
    "prefix beyond the keys": (90, 300, 5000, []),
    "no prefix": (140, 500, 0, list(range(50)) * 10),
    "one item": (140, 500, 17, list(range(483))),
    "queries begin in the prefix": (300, 300, 200, list(range(10)) * 10),
    "more queries than keys": (200, 120, 20, list(range(10)) * 10),
    "keys end in the tile behind the gap": (66, 523, 60, [*range(400), *range(40), *range(23)]),
}


@pytest.mark.parametrize(("kernels", "arch"), KERNELS)
@pytest.mark.parametrize(("edge", "schedule"), in_turn(EDGES, SCHEDULES), ids=str)
def test_edges(edge: str, schedule: Schedule, kernels: str, arch: str) -> None:
    qo_len, kv_len, prefix_len, positions = EDGES[edge]
    keep = multi_item.visible(qo_len, kv_len, prefix_len, positions)
    items = multi_item.Items([prefix_len], [list(positions)], [keep])
    out, _ = ragged_call(qo_len, kv_len, (kernels, arch), schedule, items.arguments("cpu"))
    expected, _ = ragged_call(qo_len, kv_len, (kernels, arch), schedule, {"custom_mask": keep.flatten()}, "reference")
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("kernels", "arch"), KERNELS)
def test_captured_plans(kernels: str, arch: str) -> None:
    """Plans of other lengths and items write their bounds where the first plan's are."""
    largest = paged((60, 20, 8), (300,) * 3, mask="items", **heads(2, 1))
    made: Any = graph_wrapper(largest, "cpu", 60, 0, backend="emulator")[0]
    addresses = set()
    with using(arch, kernels=kernels, sms=2):
        for case in (largest, *(random_lengths(largest, seed, 300) for seed in range(3))):
            assert_planned_right(case, made)
            run = made._planned().launch.planned
            addresses.add(run.records[1].data_ptr())
    assert len(addresses) == 1
