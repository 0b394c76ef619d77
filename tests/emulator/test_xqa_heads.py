"""Warps of the decode kernel that have a whole segment each, on the emulator."""

from __future__ import annotations

import pytest

from cute_attn.kernels.xqa.tiles import EVEN, Shape
from tests.emulator.test_xqa import launches
from tests.support.schedules import KINDS, in_turn
from tests.support.xqa_case import XqaCase
from tests.support.xqa_rules import forced_ring

pytestmark = pytest.mark.emulator

# (case, ring, rows that share a read of the keys, grid)
CASES = {
    "all heads of a token": (XqaCase((150, 150), kv="e4m3", heads=(32, 8)), "8x2x16x2h", 4, (1, 1, 2)),
    "rows that fill a block, sinks": (
        XqaCase((90, 0, 133), kv="e4m3", heads=(64, 8), page_size=64, kv_layout="HND", sinks=True),
        "8x3x16x2h",
        8,
        (1, 1, 3),
    ),
    "16 bits": (XqaCase((140,), heads=(32, 8), kv_layout="HND", sinks=True), "8x2x16x1h", 4, (1, 1, 1)),
    "two CTAs for the heads of a token": (
        XqaCase((70, 5, 100), heads=(64, 8), page_size=64, form="tensor"),
        "4x3x16x2h",
        8,
        (2, 1, 3),
    ),
    "a block of rows for each of two tokens": (
        XqaCase((60, 133), kv="e4m3", heads=(64, 8), q_len=2, page_size=64),
        "4x3x16x4h",
        8,
        (4, 1, 2),
    ),
    "two blocks of rows in a warp": (XqaCase((60, 133), heads=(32, 4), q_len=2), "4x3x16x1h", 16, (1, 1, 2)),
    "a tree, queries of unequal length": (
        XqaCase((300, 40), kv="e4m3", heads=(8, 4), q_len=4, q_lens=(4, 2), mask=True, window_left=200, out="e4m3"),
        "4x3x32x2h",
        8,
        (1, 1, 2),
    ),
    "padded rows": (
        XqaCase((90, 41), kv="e4m3", heads=(8, 2), head_dim=80, q_len=2, out="e4m3"),
        "2x2x16x4h",
        8,
        (1, 1, 2),
    ),
    "keys ahead": (XqaCase((200, 7), kv="e4m3", heads=(16, 4)), "4x2x16x4ha2", 4, (1, 1, 2)),
    "a wide head": (XqaCase((70, 33), kv="fp16", q="fp16", heads=(6, 2), head_dim=256), "2x2x32x1h", 3, (1, 1, 2)),
    "4 bits, rows that are there twice": (
        XqaCase((150, 33), kv="nvfp4", heads=(4, 2), bmm1_scale=0.001),
        "2x2x32x4h",
        2,
        (1, 1, 2),
    ),
}


@pytest.mark.parametrize(("name", "schedule"), in_turn(CASES, KINDS, lambda name: CASES[name][0].kv))
def test_a_warp_for_every_head(name: str, schedule: str) -> None:
    case, ring, rows, grid = CASES[name]
    with forced_ring(ring, case, Shape(EVEN), rows):
        (record,) = launches(case, 2, schedule)
    assert (record.spec["work"], record.grid) == ("heads", grid)
