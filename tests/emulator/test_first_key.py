"""Kv tiles that begin with the first key of a window, on the wgmma kernel: tiles that `perf.search --rows` tries."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest

from cute_attn.emulator import Schedule
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from perf.tile_trials import Trial, force, tile
from tests.support.batch_case import BatchCase, dims, heads, ragged
from tests.support.case import Case
from tests.support.matrix import BF16, CAUSAL, prefill
from tests.support.persistent_emulated import ALL_SCHEDULES, FA3, solve_batch, solve_single

pytestmark = pytest.mark.emulator

# Rows of requests without keys, or whose window ends before the first key or begins in the middle of the keys.
LENGTHS = (70, 3, 0, 200, 40), (150, 40, 9, 200, 20)
SMALL, TWO = tile(64, 48, 4, 2, 3, from_first_key=True), tile(128, 48, 4, 2, 2, from_first_key=True)
FOUR, ONE_TILE = tile(64, 48, 3, 2, 4, from_first_key=True), tile(64, 144, 2, 2, 2, from_first_key=True)
WIDE = tile(192, 80, 4, 2, from_first_key=True, ping_pong=True)


def batch(window_left: int, **fields: object) -> BatchCase:
    return ragged(*LENGTHS, mask="causal", window_left=window_left, **fields)


GPT_OSS = batch(40, sinks=True, dtype="bfloat16", **heads(8, 1), **dims(64))
TRIALS = (
    (GPT_OSS, Trial(SMALL, packed=True)),
    (GPT_OSS, Trial(TWO, packed=True)),
    (batch(0, sinks=True, **heads(8, 1), **dims(64)), Trial(FOUR, packed=True)),
    (batch(127, **heads(2, 1), **dims(64)), Trial(ONE_TILE, packed=False)),
    (batch(100, **heads(4, 2), **dims(64)), Trial(WIDE, packed=True)),
    (batch(40, **heads(4, 2), **dims(128)), Trial(tile(192, 64, 3, 1, from_first_key=True), packed=True)),
)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES, ids=lambda schedule: schedule.kind)
@pytest.mark.parametrize(("problem", "trial"), TRIALS, ids=[trial.name for _, trial in TRIALS])
def test_batch(problem: BatchCase, trial: Trial, schedule: Schedule) -> None:
    with force(trial):
        emulation = solve_batch(FA3, problem, schedule, sms=2)
    assert emulation.records[0].spec["tile"] == dataclasses.asdict(trial.tile or pytest.fail())
