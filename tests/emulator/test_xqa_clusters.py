"""Shares of clusters of CTAs, which merge in shared memory, on the emulator."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from cute_attn import emulator
from cute_attn.emulator.machine import Schedule
from cute_attn.kernels.xqa.tiles import Shape
from tests.emulator.test_xqa import decode
from tests.support.schedules import KINDS, all_alike, in_turn
from tests.support.xqa_case import XqaCase, build
from tests.support.xqa_rules import forced_ring

pytestmark = pytest.mark.emulator


class Clusters(NamedTuple):
    case: XqaCase
    sms: int  # of which three quarters take clusters of more than two CTAs
    ring: str
    grid: tuple[int, int]  # CTA groups, CTAs of one


CASES = {
    "unequal segments, several to a cluster": Clusters(
        XqaCase((300, 0, 70, 9, 1000, 0, 5), heads=(8, 2)), 16, "4x3x16x1c2", (2, 8)
    ),
    "equal parts": Clusters(XqaCase((1500, 1400, 0), heads=(8, 2), sinks=True), 32, "4x3x16x1c4", (2, 12)),
    "clusters that leave slices to each other": Clusters(XqaCase((1500,), heads=(8, 2)), 48, "4x3x16x1c6", (2, 18)),
    "no keys": Clusters(XqaCase((0, 0, 0), heads=(4, 1), page_size=256, sinks=True), 33, "4x3x16x1c8", (1, 24)),
    "drafts, padded rows and a request without": Clusters(
        XqaCase((1400, 30, 77), kv="e4m3", heads=(8, 1), head_dim=80, q_len=3, q_lens=(2, 0, 3), mask=True),
        11,
        "4x3x16x1c2",
        (1, 10),
    ),
    "more requests than lanes": Clusters(XqaCase(tuple(range(40)), kv="e4m3", heads=(4, 1)), 16, "2x3x16x1c4", (1, 12)),
    "two blocks of rows and unequal queries": Clusters(
        XqaCase((1000, 170), kv="e4m3", heads=(16, 2), q_len=4, q_lens=(4, 2), mask=True, window_left=900),
        22,
        "4x2x32x1c4",
        (4, 4),
    ),
    "wide heads": Clusters(
        XqaCase((400, 90, 300), heads=(16, 1), head_dim=256, window_left=350), 22, "4x3x16x1c4", (2, 8)
    ),
    "many parts of a segment": Clusters(XqaCase((3000,), heads=(2, 1), head_dim=64), 88, "2x2x16x1c2", (1, 88)),
}


@pytest.mark.parametrize(("name", "schedule"), in_turn(CASES, (*KINDS, "lagging"), all_alike))
def test_shares_of_clusters(name: str, schedule: str) -> None:
    case, sms, ring, grid = CASES[name]
    built, shape = build(case), Shape(len(case.seq_lens), case.heads[1])
    rows = case.q_len * case.heads[0] // case.heads[1]
    gpu = emulator.using("sm_90a", sms=sms, schedule=Schedule(schedule, 1))
    with forced_ring(f"{ring}a1", case, shape, rows), gpu as emulation:
        assert built.check(*decode(built)) == ""
    assert [record.grid for record in emulation.records] == [(*grid, 1)]
