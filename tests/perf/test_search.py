"""Tile search on a CPU: what it tries, how it climbs, which rows it proposes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cute_attn.kernels.blocks.tiles import TileProblem
from cute_attn.kernels.fa3 import tiles as fa3_tiles
from cute_attn.kernels.fa3.host.family import KERNELS
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.host.persistent.batch import tiling
from perf import search, tile_trials
from perf.search import Rates
from tests.support.backend_problems import build
from tests.support.batch_case import dims, ragged

ROOT = Path(__file__).parents[2]
START = HopperTile(128, 64)
GOAL = HopperTile(128, 128, 3, 2, ping_pong=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_neighbours_differ_in_one_field_and_fit(head_dim: int) -> None:
    tile = fa3_tiles.choose(TileProblem((head_dim, head_dim)))
    assert search.fits(head_dim, tile)
    found = search.neighbours(head_dim, tile)
    assert len(found) > 2
    for other in found:
        pairs = zip(dataclasses.astuple(tile), dataclasses.astuple(other), strict=True)
        assert sum(a != b for a, b in pairs) == 1
        assert HopperMemory(other, head_dim, head_dim).bytes <= search.SMEM_LIMIT


def test_tiles_that_do_not_fit() -> None:
    assert not search.fits(64, HopperTile(192, 160))  # 80 + 40 + 32 registers of 160
    assert search.fits(64, HopperTile(128, 160))
    assert not search.fits(256, HopperTile(128, 96))  # 64 KB of Q and 192 KB of K and V


def speed(tile: HopperTile) -> float:
    """Returns a speed that falls with every step away from the goal."""
    steps = abs(tile.cols - GOAL.cols) / 16 + abs(tile.stages - GOAL.stages) + (tile.rows != GOAL.rows)
    return 500 - 20 * steps - 20 * (tile.q_stages != GOAL.q_stages) - 20 * (tile.ping_pong != GOAL.ping_pong)


def test_climbing_reaches_the_top_and_tries_nothing_twice() -> None:
    tried: list[HopperTile] = []

    def rate(tiles: Sequence[HopperTile]) -> Rates:
        tried.extend(tiles[1:])
        factor = 1 + len(tried) / 1000  # clocks drift from one call to the next
        return {tile: speed(tile) * factor for tile in tiles}

    best, gain = search.climb(START, lambda tile: search.neighbours(64, tile), rate)
    assert best == GOAL
    assert gain == pytest.approx(speed(GOAL) / speed(START))
    assert len(set(tried)) == len(tried)


def test_climbing_stays_where_nothing_is_better_or_works() -> None:
    def noise(tiles: Sequence[HopperTile]) -> Rates:
        return {tile: 500 + i / 2 for i, tile in enumerate(tiles[:3])}  # two neighbours within the noise, the rest fail

    assert search.climb(START, lambda tile: search.neighbours(64, tile), noise) == (START, 1.0)
    assert search.climb(START, lambda tile: search.neighbours(64, tile), lambda _: {}) == (START, 1.0)


def test_the_row_is_best_over_all_workloads() -> None:
    rates = {"long": {START: 500.0, GOAL: 540.0}, "short": {START: 300.0, GOAL: 280.0, HopperTile(192, 128): 900.0}}
    assert search.proposal(rates) == GOAL
    rates["short"][GOAL] = 270.0
    assert search.proposal(rates) == START


def test_climbing_ends_in_time() -> None:
    steps = iter([True, False])

    def rate(tiles: Sequence[HopperTile]) -> Rates:
        return {tile: speed(tile) for tile in tiles}

    best, gain = search.climb(START, lambda tile: search.neighbours(64, tile), rate, lambda: next(steps))
    assert gain == pytest.approx(speed(best) / speed(START))
    assert best in search.neighbours(64, START)


def test_plans_take_a_forced_tile() -> None:
    """Plans the workload before and afterwards, too."""
    settings = build(ragged((9,), (40,), **dims(64))).problem.settings

    def planned() -> HopperTile:
        return tiling(KERNELS, settings, 64, 1024, "sm_90a", 132).tile

    own = planned()
    for tile in (GOAL, START):
        with tile_trials.force(tile_trials.Trial(tile)):
            assert planned() == tile
    assert planned() == own


def test_the_reason_is_given_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "perf.search", "--head-dim", "64"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Nothing can be measured" in done.stderr
