"""Tiles that `perf.tune` tries, on the wgmma kernel: kv tiles that begin with the first key of a window."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from cute_attn import emulator
from cute_attn.emulator import Schedule
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.host import single
from cute_attn.schedule.split_kv import Split
from perf import peers
from perf.bench import oracle
from perf.tiles import Trial, bind, force
from perf.workloads import one_request
from tests.support.batch_case import BatchCase, dims, heads, ragged
from tests.support.matrix import BF16, CAUSAL, prefill
from tests.support.persistent_emulated import FA3, assert_cut, solve_on

pytestmark = pytest.mark.emulator

EAGER, DELAYED, ADVERSARIAL = Schedule(), Schedule("delayed", 1), Schedule("adversarial", 2)
# Requests without queries, and whose rows and keys end within a tile.
LENGTHS = (20, 3, 0), (100, 40, 9)
EARLY: dict[str, Any] = {"from_first_key": True, "ping_pong": False}
TWO_CTAS = HopperTile(128, 48, 4, 2, per_sm=2, **EARLY)
FOUR_CTAS = HopperTile(64, 48, 3, 2, per_sm=4, **EARLY)
GPT_OSS = ragged(*LENGTHS, mask="causal", window_left=60, sinks=True, **heads(8, 1), **dims(64))
MANY_HEADS = ragged(*LENGTHS, mask="causal", window_left=60, dtype="bfloat16", **heads(4, 2), **dims(128))
BATCHES = (
    (GPT_OSS, Trial(TWO_CTAS, packed=True), ADVERSARIAL),
    (dataclasses.replace(GPT_OSS, window_left=0), Trial(FOUR_CTAS, packed=True), DELAYED),
    (dataclasses.replace(GPT_OSS, window_left=127), Trial(HopperTile(64, 144, 2, 2, per_sm=2, **EARLY)), EAGER),
    (MANY_HEADS, Trial(HopperTile(192, 64, 3, 1, from_first_key=True, ping_pong=True), packed=True), DELAYED),
)


@pytest.mark.parametrize(("batch", "trial", "schedule"), BATCHES, ids=[trial.name for _, trial, _ in BATCHES])
def test_batch(batch: BatchCase, trial: Trial, schedule: Schedule) -> None:
    with force(trial):
        emulation = solve_on(FA3, batch, schedule, sms=2)
    assert trial.tile
    assert emulation.records[0].spec["tile"] == dataclasses.asdict(trial.tile)


def test_keys_of_a_single_request_are_split() -> None:
    """The tiles of a split begin with its first key, not with the first that the rows see."""
    problem = prefill(40, 300, (2, 1), 64, **CAUSAL, **BF16, window_left=200)
    three = mock.patch.object(single, "split_kv", return_value=Split(3, 3))
    with force(Trial(TWO_CTAS, packed=True)), three:
        emulation = solve_on(FA3, problem, ADVERSARIAL, sms=2)
    assert_cut(FA3, emulation)


def test_a_row_of_the_tuner_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single request, which runs as a batch of one, by the tile that is tried."""
    monkeypatch.setattr(peers, "WORKSPACE_BYTES", 1 << 20)  # the emulator follows every word of it
    w = one_request(70, 150, 2, 2, 64, 64, causal=True)
    sets = [w.inputs(torch.device("cpu"))]
    trial = Trial.parse("64x64 2+1 x2")
    with emulator.using("sm_90a", kernels="fa3", sms=2, schedule=DELAYED) as emulation:
        (call,) = bind(trial, w, sets, backend="emulator")
        error = oracle(w, sets[0]).error(call())
    assert trial.tile
    assert {r.spec["tile"]["rows"] for r in emulation.records if "tile" in r.spec} == {trial.tile.rows}
    assert error < 5e-3


@pytest.mark.parametrize(
    "change", [{"mask": "stop"}, {"kv": "paged"}, {"scores": ("scale",)}, {"pos_encoding": "rope"}, {"kv": "gathered"}]
)
def test_only_kernels_that_can_take_them(change: dict[str, object]) -> None:
    spec = Fa3Spec("bfloat16", "bfloat16", 64, 64, mask="band", tile=TWO_CTAS)
    with pytest.raises(ValueError, match="from_first_key takes dense keys"):
        dataclasses.replace(spec, **change)  # type: ignore[arg-type]
