"""Heads of groups whose size divides no tile share tiles of the wgmma kernel: whole tokens, then unused rows."""

from __future__ import annotations

import pytest

from cute_attn.emulator import Schedule
from cute_attn.kernels.blocks.tiles import tile_rows
from cute_attn.kernels.fa3.host.family import KERNELS
from cute_attn.kernels.fa3.spec import HopperTile
from tests.support.batch_case import E4M3, BatchCase, dims, features, heads, paged, ragged
from tests.support.matrix import CAUSAL
from tests.support.matrix import prefill as request
from tests.support.persistent_emulated import CUDA, FA3, assert_cut, solve_on
from tests.support.persistent_emulated import name as named
from tests.support.schedules import ALL_SCHEDULES, all_alike, in_turn

pytestmark = pytest.mark.emulator

LENGTHS = (47, 0, 3, 30), (150, 40, 9, 200)
BATCHES = {
    "groups of 5": paged(*LENGTHS, 16, **heads(5, 1), **dims(256), dtype="bfloat16"),
    "of 7, causal": paged((40, 9), (700, 500), 16, mask="causal", **heads(7, 1), **dims(128)),
    "of 3, window, sinks": ragged(*LENGTHS, mask="causal", window_left=40, sinks=True, **heads(6, 2), **dims(64)),
    "of 6, custom masks, gathered": paged(*LENGTHS, 3, mask="packed", **heads(6, 1), **dims(64)),
    "of 5, fp8": ragged(*LENGTHS, mask="causal", dtype=E4M3, o_dtype="bfloat16", **heads(5, 1), **dims(128)),
    "of 12, rotated": ragged(*LENGTHS, pos_encoding_mode="ROPE_LLAMA", **heads(12, 1), **dims(64)),
}


@pytest.mark.parametrize(("name", "schedule"), in_turn(BATCHES, structure=all_alike), ids=named)
def test_groups_of_any_size_share_tiles(name: str, schedule: Schedule) -> None:
    batch: BatchCase = BATCHES[name]
    solve_on(FA3, batch, schedule, sms=3)
    group = batch.num_qo_heads // batch.num_kv_heads
    assert KERNELS.heads_per_tile(features(batch, CUDA), 47, HopperTile(128, 64, 2, 1)) == group


@pytest.mark.parametrize("schedule", ALL_SCHEDULES, ids=named)
def test_split_groups_share_tiles(schedule: Schedule) -> None:
    """Slots of partial results have as many rows as are used."""
    batch = paged((20, 9), (1300, 300), 16, mask="causal", **heads(7, 1), **dims(128))
    emulation = solve_on(FA3, batch, schedule, sms=10)
    assert_cut(FA3, emulation)


def test_single_requests() -> None:
    solve_on(FA3, request(60, 900, (7, 1), 64, **CAUSAL), Schedule("adversarial", 1), sms=4)
    assert_cut(FA3, solve_on(FA3, request(20, 1000, (7, 1), 64), Schedule("adversarial", 1), sms=8))


def test_rows_of_whole_tokens() -> None:
    tile = HopperTile(128, 64, 2, 1)
    assert {heads: tile_rows(tile.rows, heads) for heads in (1, 3, 5, 7, 8, 12, 128)} == {
        1: 128, 3: 126, 5: 125, 7: 126, 8: 128, 12: 120, 128: 128,
    }  # fmt: skip


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
    of = features(ragged((1,), (1,), **heads(*group), **dims(128)), CUDA)
    assert KERNELS.heads_per_tile(of, qo_len, HopperTile(128, 64, 2, 1)) == expected
