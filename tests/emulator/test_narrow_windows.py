"""Tiles of one MMA warpgroup, several CTAs of which share an SM: causal rows under windows, on the wgmma kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cute_attn.emulator import Schedule
from tests.support.batch_case import E4M3, BatchCase, dims, heads, paged, ragged
from tests.support.persistent_emulated import FA3, name, solve_on
from tests.support.schedules import all_alike, in_turn

pytestmark = pytest.mark.emulator

LENGTHS = (70, 3, 0, 200), (150, 40, 9, 200)
SHARED = ragged(*LENGTHS, mask="causal", window_left=40, sinks=True, **heads(8, 1), **dims(64))
PAGES = paged((65, 130), (300, 130), 64, mask="causal", window_left=127, kv_layout="HND", **heads(2, 1), **dims(64))
FP8: dict[str, Any] = {"dtype": E4M3, "o_dtype": "bfloat16"}
BATCHES = [  # and rows and CTAs per SM of their tiles
    (SHARED, (64, 4)),
    (dataclasses.replace(SHARED, window_left=200, dtype="bfloat16"), (192, 1)),
    (ragged(*LENGTHS, mask="causal", window_left=70, **FP8, **heads(4, 1), **dims(128)), (192, 1)),
    (dataclasses.replace(SHARED, num_qo_heads=2), (64, 3)),
    (paged(*LENGTHS, 32, mask="causal", window_left=0, **heads(4, 2), **dims(128)), (64, 2)),
    (PAGES, (64, 3)),
    (ragged((70, 3), (100, 40), mask="causal", window_left=30, sinks=True, **heads(4, 2), **dims(256)), (128, 1)),
]


@pytest.mark.parametrize(("case", "schedule"), in_turn(BATCHES, structure=all_alike), ids=name)
def test_narrow_windows(case: tuple[BatchCase, tuple[int, int]], schedule: Schedule) -> None:
    batch, tile = case
    emulation = solve_on(FA3, batch, schedule, sms=2)
    (record,) = (record for record in emulation.records if record.spec["kernel"] == "fa3")
    assert (record.spec["tile"]["rows"], record.spec["tile"]["per_sm"]) == tile
