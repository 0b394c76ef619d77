"""Tiles that the wgmma kernel takes by the size of a launch, and narrow ones of windows, several CTAs of which share an
SM: rows and keys that end within a tile."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest

from cute_attn.emulator import Schedule
from cute_attn.emulator.settings import Emulation
from cute_attn.kernels.blocks.tiles import Launch, TileProblem
from cute_attn.kernels.fa3.tiles import choose
from cute_attn.kernels.host.persistent import variant
from cute_attn.schedule import cost_model
from cute_attn.schedule.cuts import Cut
from tests.support.batch_case import E4M3, BatchCase, dims, heads, paged, ragged
from tests.support.matrix import BF16, CAUSAL, HND, prefill
from tests.support.persistent_emulated import FA3, assert_cut, name, solve_on
from tests.support.schedules import all_alike, in_turn

pytestmark = pytest.mark.emulator

LONG, MEDIUM = Launch(4096), Launch()
FEW, SHORT, SHORTEST = Launch(kv_len=1024, few=True), Launch(kv_len=1024), Launch(kv_len=224)
# Of q in registers, with SHORT all, the last step half zeros.
SINGLE: tuple[tuple[Launch, BatchCase], ...] = (
    (LONG, prefill(400, 500, (1, 1), 128, **CAUSAL, **BF16)),
    (FEW, prefill(150, 200, (2, 1), 128, **CAUSAL)),
    (FEW, prefill(150, 200, (2, 1), 72)),
    (SHORT, prefill(150, 200, (2, 2), 56, **CAUSAL, **BF16)),
    (SHORTEST, prefill(197, 197, (1, 1), 64, **BF16)),
    (SHORTEST, prefill(197, 197, (1, 1), 72)),
    (MEDIUM, prefill(400, 500, (1, 1), 72, **BF16)),
    (MEDIUM, prefill(200, 400, (2, 1), 96, **CAUSAL)),
    (MEDIUM, prefill(130, 270, (1, 1), 160, **BF16)),
    (MEDIUM, prefill(150, 400, (2, 1), 192, **CAUSAL)),
)
CUT = (
    ragged((400,), (700,), **heads(3, 3), **dims(64)),  # three query tiles of each head
    ragged((150, 150), (500, 500), dtype="bfloat16", sinks=True, **heads(1, 1), **dims(256)),
)
LENGTHS = (200, 0, 37, 1), (300, 20, 64, 0)
BATCHES: tuple[tuple[Launch, BatchCase], ...] = (
    (LONG, ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(128))),
    (SHORT, ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(64))),
    (SHORT, ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(80))),
    (SHORTEST, ragged(*LENGTHS, **heads(2, 1), **dims(80))),
    (MEDIUM, ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(96))),
    (MEDIUM, ragged(*LENGTHS, **heads(2, 1), **dims(72))),
    (MEDIUM, ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(192))),
)

WINDOW = (70, 3, 0, 200), (150, 40, 9, 200)
SHARED = ragged(*WINDOW, mask="causal", window_left=40, sinks=True, **heads(8, 1), **dims(64))
FP8: dict[str, Any] = {"dtype": E4M3, "o_dtype": "bfloat16"}
NARROW: tuple[tuple[tuple[int, int], BatchCase], ...] = (  # rows and CTAs per SM of tiles of one MMA warpgroup, or two
    ((64, 4), SHARED),
    ((192, 1), replace(SHARED, window_left=200, dtype="bfloat16")),
    ((192, 1), ragged(*WINDOW, mask="causal", window_left=70, **FP8, **heads(4, 1), **dims(128))),
    ((64, 3), replace(SHARED, num_qo_heads=2)),
    ((64, 2), paged(*WINDOW, 32, mask="causal", window_left=0, **heads(4, 2), **dims(128))),
    ((64, 3), paged((65, 130), (300, 130), 64, mask="causal", window_left=127, **HND, **heads(2, 1), **dims(64))),
    ((128, 1), ragged((70, 3), (100, 40), mask="causal", window_left=30, sinks=True, **heads(4, 2), **dims(256))),
)


def assert_tile(launch: Launch, mask: str, emulation: Emulation) -> None:
    spec = emulation.records[0].spec
    head_dims = spec["head_dim_qk"], spec["head_dim_vo"]
    tile = choose(TileProblem(head_dims, full=mask != "causal", launch=launch))
    assert spec["tile"] == asdict(tile)


@pytest.mark.parametrize(("case", "schedule"), in_turn((*SINGLE, *BATCHES), structure=all_alike), ids=name)
def test_tiles(case: tuple[Launch, BatchCase], schedule: Schedule) -> None:
    launch, problem = case
    with mock.patch.object(variant, "launch_of", return_value=launch):
        emulation = solve_on(FA3, problem, schedule, sms=2)
    assert_tile(launch, problem.mask, emulation)


@pytest.mark.parametrize(("case", "schedule"), in_turn(NARROW, structure=all_alike), ids=name)
def test_narrow_windows(case: tuple[tuple[int, int], BatchCase], schedule: Schedule) -> None:
    tile, batch = case
    records = solve_on(FA3, batch, schedule, sms=2).records
    (found,) = (record.spec["tile"] for record in records if record.spec["kernel"] == "fa3")
    assert (found["rows"], found["per_sm"]) == tile


@pytest.mark.parametrize(("batch", "schedule"), in_turn(CUT, structure=all_alike), ids=name)
def test_cut_last_wave(batch: BatchCase, schedule: Schedule) -> None:
    with (
        mock.patch.object(variant, "launch_of", return_value=LONG),
        mock.patch.object(cost_model, "last_wave", return_value=Cut(0, 1, 2)),
        mock.patch.object(cost_model, "BALANCED", (0, 1)),
    ):
        emulation = solve_on(FA3, batch, schedule, sms=3 if batch.head_dim_qk == 256 else 2)
    assert_cut(FA3, emulation)
    assert_tile(LONG, batch.mask, emulation)
