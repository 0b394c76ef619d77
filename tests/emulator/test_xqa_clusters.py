"""Segments on clusters of CTAs, which merge in shared memory, on the emulator."""

from __future__ import annotations

import pytest

from tests.emulator.test_xqa import launches
from tests.support.schedules import KINDS, in_turn
from tests.support.xqa_case import XqaCase

pytestmark = pytest.mark.emulator

# (case, SMs, CTAs of a cluster, grid): three quarters of the SMs take clusters of one request; a segment of several
# requests has one cluster. Large pages allow more keys than there are.
CASES = {
    "one cluster a unit": (XqaCase((700,), heads=(8, 2), page_size=8192), 22, 6, (2, 6, 1)),
    "clusters that leave slices to each other": (XqaCase((1500,), heads=(8, 2)), 44, 8, (2, 16, 1)),
    "clusters without tiles": (XqaCase((40,), kv="e4m3", heads=(4, 1), page_size=256), 33, 8, (1, 24, 1)),
    "no keys": (XqaCase((0,), heads=(4, 1), page_size=256, sinks=True), 33, 8, (1, 24, 1)),
    "drafts and padded rows": (
        XqaCase((1400,), kv="e4m3", heads=(8, 1), head_dim=80, q_len=3, q_lens=(2,), mask=True),
        22,
        8,
        (2, 8, 1),
    ),
    "several requests": (XqaCase((700, 40, 0), heads=(8, 2), window_left=600, sinks=True), 22, 8, (2, 8, 3)),
    "several requests of unequal queries": (
        XqaCase((1000, 170), kv="e4m3", heads=(16, 2), q_len=4, q_lens=(4, 2), mask=True, window_left=900),
        22,
        8,
        (4, 8, 2),
    ),
    "several requests, narrow heads": (
        XqaCase((300, 7), kv="e4m3", heads=(16, 1), head_dim=64, window_left=250, page_size=64),
        22,
        8,
        (1, 8, 2),
    ),
    "several requests, wide heads": (
        XqaCase((400, 90), heads=(16, 1), head_dim=256, window_left=350),
        22,
        8,
        (2, 8, 2),
    ),
    "a long window, two blocks of rows": (XqaCase((1300,), heads=(12, 1), window_left=900), 22, 8, (1, 16, 1)),
}


@pytest.mark.parametrize(("name", "schedule"), in_turn(CASES, KINDS))
def test_segments_of_clusters(name: str, schedule: str) -> None:
    case, sms, cluster, grid = CASES[name]
    (record,) = launches(case, sms, schedule)
    assert (record.spec["cluster_size"], record.grid) == (cluster, grid)
