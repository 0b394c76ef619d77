"""Pairs of CTAs of the wgmma kernel that share K and V by multicast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest

from cute_attn.emulator import Schedule
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.host.persistent.batch import tiling
from cute_attn.kernels.host.persistent.variant import PersistentKernels
from tests.support.batch_case import BatchCase, dims, heads, paged, ragged
from tests.support.case import Case
from tests.support.matrix import BF16, CAUSAL, prefill
from tests.support.persistent_emulated import ALL_SCHEDULES, FA3, solve_batch, solve_single

pytestmark = pytest.mark.emulator

LAGGING = tuple(Schedule("lagging", warp) for warp in (0, 4, 11, 12, 16, 23))
TILE = HopperTile(256, 64, 2, 1, ping_pong=False, ctas=2)
TWO_QUERY_TILES = HopperTile(256, 64, 3, 2, ping_pong=False, ctas=2)


@contextlib.contextmanager
def forced(tile: HopperTile) -> Iterator[None]:
    tiling.cache_clear()
    try:
        with mock.patch.object(PersistentKernels, "tile", return_value=tile):
            yield
    finally:
        tiling.cache_clear()


# Several work items per pair, slots used again, rows of one CTA alone, keys that only one of the CTAs sees, splits.
SINGLE: tuple[tuple[Case, HopperTile], ...] = (
    (prefill(400, 400, (2, 1), 128, **CAUSAL, **BF16), TWO_QUERY_TILES),
    (prefill(300, 130, (1, 1), 256), TILE),
    (prefill(70, 700, (1, 1), 128), TWO_QUERY_TILES),
    (prefill(200, 200, (1, 1), 256, **CAUSAL), HopperTile(256, 64, 2, 1, ping_pong=False, ctas=2, q_columns=2)),
    (prefill(200, 300, (1, 1), 128, **CAUSAL, **BF16), HopperTile(256, 64, 2, 1, ping_pong=False, ctas=2, q_columns=2)),
    (prefill(200, 300, (1, 1), 64, **CAUSAL, **BF16), HopperTile(128, 64, 2, 1, ping_pong=True, q_columns=1)),
)
BATCHES: tuple[tuple[BatchCase, HopperTile], ...] = (
    (ragged((300, 0, 37, 1), (300, 20, 64, 0), mask="causal", **dims(128), **heads(2, 1)), TWO_QUERY_TILES),
    (paged((150, 9), (200, 260), page_size=32, window_left=90, **dims(128), **heads(4, 2)), TWO_QUERY_TILES),
)


@pytest.mark.parametrize("schedule", (*ALL_SCHEDULES, *LAGGING), ids=lambda s: f"{s.kind}{s.seed}")
@pytest.mark.parametrize("single", SINGLE, ids=lambda one: str(one[0]))
def test_single(single: tuple[Case, HopperTile], schedule: Schedule) -> None:
    problem, tile = single
    with forced(tile):
        emulation = solve_single(FA3, problem, schedule, sms=4)
    assert emulation.records[0].spec["tile"]["ctas"] == tile.ctas


@pytest.mark.parametrize("schedule", (*ALL_SCHEDULES, *LAGGING), ids=lambda s: f"{s.kind}{s.seed}")
@pytest.mark.parametrize("batch", BATCHES, ids=lambda one: str(one[0]))
def test_batch(batch: tuple[BatchCase, HopperTile], schedule: Schedule) -> None:
    with forced(batch[1]):
        emulation = solve_batch(FA3, batch[0], schedule, sms=4)
    assert emulation.records[0].spec["tile"]["ctas"] == batch[1].ctas
