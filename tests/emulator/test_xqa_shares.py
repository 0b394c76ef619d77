"""How CTAs and warps divide segments, on the emulator: shares of a warp's own unit (`WarpShares`) or of a CTA's, of
requests of about equal lengths and of any others, segments that are dealt out, and a warp for every head.
"""

from __future__ import annotations

import pytest
import torch

from cute_attn.kernels.xqa.tiles import EVEN, Shape
from cute_attn.request.decode import COUNTER_BYTES
from tests.emulator.test_xqa import launches
from tests.support.schedules import KINDS, in_turn
from tests.support.xqa_case import XqaCase
from tests.support.xqa_rules import forced_ring

pytestmark = pytest.mark.emulator
WORKSPACE_BYTES = COUNTER_BYTES + (1 << 20)
WARP_SHARES = "2x2x16x2e"  # two CTAs of two warps per SM, a unit for each warp
CTA_SHARES = "2x2x16x1"  # a CTA of two warps per SM, a unit for both

# By ring: case, SMs, whether CTAs leave no partial results.
OF_WARPS = {
    "a segment a share": (XqaCase((130, 150, 141, 127), kv="e4m3"), 2, True),
    "shorter than the longest by a quarter": (XqaCase((160, 128, 160, 128), kv="e4m3"), 2, True),
    "two segments a share": (XqaCase((33, 40, 48, 34, 48, 40, 33, 41), kv="e4m3", sinks=True), 2, True),
    "two segments a share, one in the last": (XqaCase((60,) * 7, kv="e4m3"), 2, True),
    "three segments a share, one of them short": (XqaCase((160, 48, 160, 160, 160, 155), kv="e4m3"), 1, True),
    "a share more than segments": (XqaCase((200,) * 3, kv="e4m3", sinks=True), 2, False),
    "two parts of a segment": (XqaCase((220, 250), kv="e4m3"), 2, False),
    "three parts of a segment": (XqaCase((220, 250), kv="e4m3"), 3, False),
    "one request": (XqaCase((300,), kv="e4m3", sinks=True), 2, False),
    "unequal": (XqaCase((40, 300, 77, 0, 5, 120), kv="e4m3", sinks=True), 2, False),
    "a long one among short ones": (XqaCase((3, 700, 0, 5), kv="e5m2", heads=(16, 4)), 3, False),
    "one more segment than shares": (XqaCase((100,) * 5, kv="e4m3"), 2, False),
    "no keys": (XqaCase((0, 0, 0, 0), kv="e4m3", sinks=True), 2, True),
    "some without keys": (XqaCase((0, 250, 0), kv="e4m3"), 1, False),
    "no requests": (XqaCase((), kv="e4m3"), 2, True),
    "more requests than lanes": (XqaCase((20,) * 36, kv="e4m3", heads=(4, 2)), 2, True),
    "more requests than lanes, unequal": (XqaCase((*range(0, 70, 2), 500), kv="e4m3", heads=(4, 2)), 2, False),
    "windows": (XqaCase((500, 300, 401, 120), kv="e4m3", window_left=99, sinks=True), 2, True),
    "windows of some": (XqaCase((500, 20, 401, 1), kv="e4m3", window_left=199), 2, False),
    "several units of a CTA group": (XqaCase((90, 96, 81, 83), kv="e4m3", heads=(16, 8)), 3, True),
    "several units of a CTA group, unequal": (XqaCase((90, 6, 181), kv="e4m3", heads=(16, 8)), 3, False),
    "several CTA groups": (XqaCase((90, 96), kv="e4m3", heads=(16, 8)), 4, True),
    "blocks of rows": (XqaCase((140, 133, 150, 139), kv="e4m3", heads=(16, 2), q_len=3), 2, True),
    "blocks of rows, unequal": (XqaCase((160, 33, 0), kv="e4m3", heads=(16, 2), q_len=3, sinks=True), 2, False),
    "a tree, queries of unequal length": (
        XqaCase((300, 40, 77), kv="e4m3", heads=(8, 2), q_len=4, q_lens=(4, 2, 0), mask=True, out="e4m3"), 2, False,
    ),
    "pages of 64, heads first": (
        XqaCase((130, 150, 141, 127), kv="e4m3", sinks=True, page_size=64, kv_layout="HND"), 2, True,
    ),
    "one tensor": (
        XqaCase((240, 50, 1, 0, 127), kv="e4m3", form="tensor", heads=(32, 4), q_len=2), 2, True,
    ),
    "padded rows": (XqaCase((190, 41), kv="e4m3", head_dim=80, out="e4m3"), 2, False),
}  # fmt: skip
# Two rounds of CTAs of two warps are four tiles.
OF_CTAS = {
    "four tiles more than equal shares": (XqaCase((200, 193, 208), kv="bf16", heads=(4, 1)), 4, True),
    "five more": (XqaCase((300, 290, 304), kv="bf16", heads=(4, 1), sinks=True), 4, False),
    "whole segments rather than parts": (XqaCase((40, 48), kv="e4m3", heads=(4, 1)), 4, True),
    "two parts of a segment": (XqaCase((220, 250), kv="bf16", heads=(4, 1)), 4, False),
    "unequal": (XqaCase((40, 700, 77, 0, 5, 120), kv="e5m2", heads=(4, 1), sinks=True), 3, False),
    "an end and a beginning in one": (XqaCase((700, 640), kv="bf16", heads=(4, 1)), 3, False),
    "a share that begins with a request": (XqaCase((*(16,) * 36, 1616), kv="bf16", heads=(4, 2)), 3, False),
    "shares past the last request": (XqaCase((*(0,) * 31, 700), kv="bf16", heads=(4, 2)), 31, False),
    "several CTA groups, windows": (XqaCase((500, 300, 401), kv="bf16", heads=(8, 2), window_left=99), 8, True),
    "blocks of rows": (XqaCase((90, 6, 96, 90), kv="e4m3", heads=(16, 2), q_len=3), 8, True),
    "a pair of warps a tile": (XqaCase((70, 96, 81), kv="e4m3", heads=(4, 1), head_dim=256), 4, True),
}
# Two such CTAs per SM: four rounds are eight tiles.
OF_SMALL_CTAS = {"five tiles more than equal shares": (OF_CTAS["five more"][0], 2, True)}
OF_CTAS_FOR_MANY = {"head dim 64": (XqaCase((40, 1500, 77, 0, 120), kv="e4m3", heads=(8, 2), head_dim=64), 1, False)}
# Segments that CTAs take one after the other (`parts.tickets`): two at most, or as many as they come to. They have up
# to 32 tiles, or up to a quarter of an equal share.
DEALT = {
    "two each": (XqaCase((40, 300, 77, 0, 5, 120), kv="e5m2", heads=(4, 1), sinks=True), 3),
    "one more": (XqaCase((40, 300, 77, 0, 5, 120, 512), kv="bf16", heads=(4, 1)), 3),
    "many": (XqaCase((60, 9, 64, 0, 33, 12, 0, 64, 505, 7, 31, 1, 90), kv="e4m3", heads=(4, 1), sinks=True), 3),
    "long, of a quarter of a share": (XqaCase((600,) * 9, kv="e4m3", heads=(4, 1)), 2),
    "several units of CTA groups, windows": (XqaCase((500, 300, 401) * 2, heads=(16, 4), window_left=99), 4),
    "blocks of rows, queries of unequal length": (
        XqaCase((60, 40, 77, 33, 96), kv="e4m3", heads=(8, 2), q_len=4, q_lens=(4, 2, 0, 1, 4), mask=True, out="e4m3"),
        3,
    ),
    "one CTA": (XqaCase((40, 90, 7, 31), kv="e4m3", heads=(4, 1)), 1),
    "a pair of warps a tile": (XqaCase((70, 96, 81, 5, 60), kv="e4m3", heads=(4, 1), head_dim=512), 2),
}
SHARES = {
    "of warps": (WARP_SHARES, OF_WARPS),
    "of CTAs": (CTA_SHARES, OF_CTAS),
    "of small CTAs": ("2x2x16x2", OF_SMALL_CTAS),
    "of many requests": ("4x2x32x4", OF_CTAS_FOR_MANY),
    "dealt out": (CTA_SHARES, {name: (*row, True) for name, row in DEALT.items()}),
}
# Cases that other schedules run too: of each way to divide the work.
CORE = {
    "of warps": ("two segments a share", "three parts of a segment", "unequal"),
    "dealt out": ("many", "one more"),
}
RUNS = [(kind, name, "adversarial") for kind, (_, cases) in SHARES.items() for name in cases]
RUNS += [(kind, name, schedule) for kind, names in CORE.items() for name in names for schedule in KINDS[:2]]


@pytest.mark.parametrize(("kind", "name", "schedule"), RUNS)
def test_shares(kind: str, name: str, schedule: str) -> None:
    ring, cases = SHARES[kind]
    case, sms, whole = cases[name]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
    with forced_ring(ring, case, Shape(EVEN)):
        works = {record.spec["work"] for record in launches(case, sms, schedule, workspace)}
    assert works <= {"even" if kind == "of warps" else "shares"}
    assert bool((workspace[COUNTER_BYTES:] == 0xFF).all()) == whole  # no partial result


# Warps that have a whole segment each: case, ring, rows that share a read of the keys, grid.
OF_HEADS = {
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


@pytest.mark.parametrize(("name", "schedule"), in_turn(OF_HEADS, KINDS, lambda name: OF_HEADS[name][0].kv))
def test_a_warp_for_every_head(name: str, schedule: str) -> None:
    case, ring, rows, grid = OF_HEADS[name]
    with forced_ring(ring, case, Shape(EVEN), rows):
        (record,) = launches(case, 2, schedule)
    assert (record.spec["work"], record.grid) == ("heads", grid)
