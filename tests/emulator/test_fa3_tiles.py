"""Tiles of the wgmma kernel: those that it takes by the size of a launch, narrow ones of windows, several CTAs of which
share an SM, and what heads of groups whose size divides no tile make of them: whole tokens, then unused rows. kv tiles
that begin with the first key of a window, which `perf.tune` tries.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest
import torch

from cute_attn import emulator
from cute_attn.emulator import Schedule
from cute_attn.emulator.settings import Emulation
from cute_attn.kernels.blocks.tiles import Launch, TileProblem
from cute_attn.kernels.fa3.host.family import FAMILY
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.fa3.tiles import rule_of
from cute_attn.kernels.host import family as tiled_family
from cute_attn.kernels.host.persistent import family as persistent_family
from cute_attn.schedule.split_kv import Split
from perf import peers
from perf.bench import oracle
from perf.tiles import Trial, bind, force
from perf.workloads import one_request
from tests.support.batch_case import E4M3, BatchCase, dims, features, heads, paged, ragged
from tests.support.matrix import BF16, CAUSAL, HND, prefill
from tests.support.persistent_emulated import FA3, assert_cut, name, solve_on
from tests.support.plain_schedule import scheduling
from tests.support.right import launched
from tests.support.schedules import ALL_SCHEDULES, all_alike, in_turn

pytestmark = pytest.mark.emulator

# Of q in registers, with "short" all, the last step half zeros.
SINGLE: tuple[tuple[Launch, BatchCase], ...] = (
    ("long", prefill(400, 500, (1, 1), 128, **CAUSAL, **BF16)),
    ("few", prefill(150, 200, (2, 1), 128, **CAUSAL)),
    ("few", prefill(150, 200, (2, 1), 72)),
    ("short", prefill(150, 200, (2, 2), 56, **CAUSAL, **BF16)),
    ("shortest", prefill(197, 197, (1, 1), 64, **BF16)),
    ("shortest", prefill(197, 197, (1, 1), 72)),
    ("", prefill(400, 500, (1, 1), 72, **BF16)),
    ("", prefill(200, 400, (2, 1), 96, **CAUSAL)),
    ("", prefill(130, 270, (1, 1), 160, **BF16)),
    ("", prefill(150, 400, (2, 1), 192, **CAUSAL)),
)
CUT = (
    ragged((400,), (700,), **heads(3, 3), **dims(64)),  # three query tiles of each head
    ragged((150, 150), (500, 500), dtype="bfloat16", sinks=True, **heads(1, 1), **dims(256)),
)
LENGTHS = (200, 0, 37, 1), (300, 20, 64, 0)
BATCHES: tuple[tuple[Launch, BatchCase], ...] = (
    ("long", ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(128))),
    ("short", ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(64))),
    ("short", ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(80))),
    ("shortest", ragged(*LENGTHS, **heads(2, 1), **dims(80))),
    ("", ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(96))),
    ("", ragged(*LENGTHS, **heads(2, 1), **dims(72))),
    ("", ragged(*LENGTHS, mask="causal", **heads(2, 1), **dims(192))),
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
    spec = launched(emulation)[0].spec
    head_dims = spec["head_dim_qk"], spec["head_dim_vo"]
    tile = rule_of(TileProblem(head_dims, full=mask != "causal", launch=launch)).value
    assert spec["tile"] == asdict(tile)


@pytest.mark.parametrize(("case", "schedule"), in_turn((*SINGLE, *BATCHES), structure=all_alike), ids=name)
def test_tiles(case: tuple[Launch, BatchCase], schedule: Schedule) -> None:
    launch, problem = case
    with mock.patch.object(persistent_family, "launch_of", return_value=launch):
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
    with mock.patch.object(persistent_family, "launch_of", return_value="long"), scheduling(cut=(1, 2)):
        emulation = solve_on(FA3, batch, schedule, sms=3 if batch.head_dim_qk == 256 else 2)
    assert_cut(FA3, emulation)
    assert_tile("long", batch.mask, emulation)


# --- groups of any size ----------------------------------------------------------------------------------------------


MIXED = (47, 0, 3, 30), (150, 40, 9, 200)
GROUPS = {
    "groups of 5": paged(*MIXED, 16, **heads(5, 1), **dims(256), dtype="bfloat16"),
    "of 7, causal": paged((40, 9), (700, 500), 16, mask="causal", **heads(7, 1), **dims(128)),
    "of 3, window, sinks": ragged(*MIXED, mask="causal", window_left=40, sinks=True, **heads(6, 2), **dims(64)),
    "of 6, custom masks, gathered": paged(*MIXED, 3, mask="packed", **heads(6, 1), **dims(64)),
    "of 5, fp8": ragged(*MIXED, mask="causal", dtype=E4M3, o_dtype="bfloat16", **heads(5, 1), **dims(128)),
    "of 7, a single request": prefill(60, 900, (7, 1), 64, **CAUSAL),
    "of 12, rotated": ragged(*MIXED, pos_encoding_mode="ROPE_LLAMA", **heads(12, 1), **dims(64)),
}


@pytest.mark.parametrize(("group", "schedule"), in_turn(GROUPS, structure=all_alike), ids=name)
def test_groups_of_any_size_share_tiles(group: str, schedule: Schedule) -> None:
    batch: BatchCase = GROUPS[group]
    solve_on(FA3, batch, schedule, sms=3)
    size = batch.num_qo_heads // batch.num_kv_heads
    assert FAMILY.heads_per_tile(features(batch), 47, HopperTile(128, 64, 2, 1)) == size


SPLIT_GROUP = paged((20, 9), (1300, 300), 16, mask="causal", **heads(7, 1), **dims(128))
SPLIT = [(SPLIT_GROUP, 10, schedule) for schedule in ALL_SCHEDULES]
SPLIT.append((prefill(20, 1000, (7, 1), 64), 8, Schedule("adversarial", 1)))


@pytest.mark.parametrize(("batch", "sms", "schedule"), SPLIT, ids=name)
def test_split_groups_share_tiles(batch: BatchCase, sms: int, schedule: Schedule) -> None:
    """Slots of partial results have as many rows as are used."""
    assert_cut(FA3, solve_on(FA3, batch, schedule, sms=sms))


@pytest.mark.parametrize(
    ("group", "qo_len", "expected"),
    [
        ((32, 8), 4, 4),
        ((32, 8), 16384, 4),  # a group that divides the rows never has more tiles
        ((40, 8), 199, 5),  # 8 tiles instead of 10
        ((40, 8), 1000, 1),  # 40 either way
        ((40, 8), 4096, 1),  # 164 instead of 160
        ((40, 1), 100, 40),  # 34 instead of 40
        ((40, 1), 128, 1),  # 43 instead of 40
        ((256, 1), 1, 1),  # more than a tile's rows
    ],
)
def test_a_group_that_does_not_divide_the_rows_shares_tiles_where_it_has_fewer(
    group: tuple[int, int], qo_len: int, expected: int
) -> None:
    one = features(ragged((1,), (1,), **heads(*group), **dims(128)))
    assert FAMILY.heads_per_tile(one, qo_len, HopperTile(128, 64, 2, 1)) == expected


# --- tiles that begin with the first key -----------------------------------------------------------------------------


EAGER, DELAYED, ADVERSARIAL = ALL_SCHEDULES
# Requests without queries, and whose rows and keys end within a tile.
SMALL = (20, 3, 0), (100, 40, 9)
EARLY: dict[str, Any] = {"from_first_key": True, "ping_pong": False}
TWO_CTAS = HopperTile(128, 48, 4, 2, per_sm=2, **EARLY)
FOUR_CTAS = HopperTile(64, 48, 3, 2, per_sm=4, **EARLY)
GPT_OSS = ragged(*SMALL, mask="causal", window_left=60, sinks=True, **heads(8, 1), **dims(64))
MANY_HEADS = ragged(*SMALL, mask="causal", window_left=60, dtype="bfloat16", **heads(4, 2), **dims(128))
TRIALS = (
    (GPT_OSS, Trial(TWO_CTAS, packed=True), ADVERSARIAL),
    (replace(GPT_OSS, window_left=0), Trial(FOUR_CTAS, packed=True), DELAYED),
    (replace(GPT_OSS, window_left=127), Trial(HopperTile(64, 144, 2, 2, per_sm=2, **EARLY)), EAGER),
    (MANY_HEADS, Trial(HopperTile(192, 64, 3, 1, from_first_key=True, ping_pong=True), packed=True), DELAYED),
)


@pytest.mark.parametrize(("batch", "trial", "schedule"), TRIALS, ids=[trial.name for _, trial, _ in TRIALS])
def test_tiles_that_begin_with_the_first_key(batch: BatchCase, trial: Trial, schedule: Schedule) -> None:
    with force(trial):
        emulation = solve_on(FA3, batch, schedule, sms=2)
    assert trial.tile
    assert launched(emulation)[0].spec["tile"] == asdict(trial.tile)


def test_keys_of_a_single_request_are_split() -> None:
    """The tiles of a split begin with its first key, not with the first that the rows see."""
    problem = prefill(40, 300, (2, 1), 64, **CAUSAL, **BF16, window_left=200)
    three = mock.patch.object(tiled_family, "split_kv", return_value=Split(3, 3))
    with force(Trial(TWO_CTAS, packed=True)), three:
        emulation = solve_on(FA3, problem, ADVERSARIAL, sms=2)
    assert_cut(FA3, emulation)


def test_a_row_of_the_tuner_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single request, which runs as a batch of one, by the tile that is tried."""
    monkeypatch.setattr(peers, "WORKSPACE_BYTES", 1 << 20)  # the emulator follows every word of it
    w = one_request(70, 150, 2, 2, 64, 64, causal=True)
    sets = [w.inputs(torch.device("cpu"))]
    trial = Trial.parse("rows=64,cols=64,per_sm=2,ping_pong=0")
    with emulator.using("sm_90a", kernels="fa3", sms=2, schedule=DELAYED) as emulation:
        (call,) = bind(trial, w, sets, backend="emulator")
        error = oracle(w, sets[0]).error(call())
    assert trial.tile
    assert {r.spec["tile"]["rows"] for r in emulation.records if "tile" in r.spec} == {trial.tile.rows}
    assert error < 5e-3
