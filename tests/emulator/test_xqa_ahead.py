"""What the decode kernel reads before the preceding kernel has ended, on the emulator: keys that it fetches into L2,
and where its first tiles are, which it copies once more where that changes.

Prefetches are rewritten to loads of a byte, whose addresses are recorded, and which fail outside the tensors of a call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from cute_attn import emulator
from cute_attn.emulator import access
from cute_attn.emulator.machine import Schedule
from cute_attn.kernels.xqa.tiles import Shape
from tests.emulator.test_xqa import decode
from tests.support import batch_case
from tests.support.batch_case import dims, heads
from tests.support.right import Solver
from tests.support.xqa_case import Built, XqaCase, build
from tests.support.xqa_rules import forced_ring

pytestmark = pytest.mark.emulator

ALL, SOME, AGAIN = 1 << 20, -1, -2
WINDOW: dict[str, Any] = {"head_dim": 64, "window_left": 127, "sinks": True}
DRAFTS: dict[str, Any] = {"q_len": 3, "q_lens": (1, 3)}
# (case, ring, keys of every request in the first tiles, from that of the first key on; AGAIN: what a wrong guess copied
# is copied twice). Windows of unequal queries begin elsewhere than those of as many each: nothing is copied early.
CASES = {
    "a tile of a window for each warp": (XqaCase((500, 0, 1, 133), heads=(16, 2), **WINDOW), "4x2x16x4wa3", ALL),
    "windows, a head each": (XqaCase((500, 0, 1, 40, 133), kv="e4m3", heads=(32, 4), **WINDOW), "2x2x32x8ha1", 32),
    "clusters of several requests": (XqaCase((700, 0, 300), window_left=400, sinks=True), "4x3x16x1+1c4a1", SOME),
    "a warp for each segment": (XqaCase((200, 7, 40), kv="e4m3", heads=(32, 2)), "1x3x32x8wa1", 32),
    "shares": (XqaCase((300, 0, 70, 9), heads=(8, 2)), "4x3x16x1a1", SOME),
    "shares of many requests": (XqaCase((40,) * 35, kv="e4m3", heads=(4, 1)), "2x3x16x1a2", SOME),
    "shares, a segment each": (XqaCase((40, 0, 100, 9), heads=(8, 2), sinks=True), "2x3x16x4a1", 32),
    "shares, several units": (XqaCase((33, 90, 1), heads=(12, 6)), "1x3x16x7a1", SOME),
    "shares, a pair of warps a tile": (XqaCase((70, 5), kv="e4m3", heads=(4, 1), head_dim=512), "2x2x16x2a1", SOME),
    "shares of windows": (XqaCase((500, 20, 401), kv="e4m3", window_left=70, heads=(4, 1)), "2x2x32x2a1", 64),
    "shares of a long segment": (XqaCase((40, 700, 9, 30), heads=(8, 2)), "2x3x16x4a1", AGAIN),
    "shares of more than are read at once": (XqaCase((*(20, 3) * 70, 90), heads=(2, 1)), "1x3x16x8a1", SOME),
    "shares of one beyond that are long": (XqaCase((*(9,) * 129, 520), heads=(2, 1)), "1x3x16x8a1", AGAIN),
    "shares, queries of several tokens": (XqaCase((90, 200), heads=(4, 1), **DRAFTS), "2x3x16x1a1", SOME),
    "shares, unequal queries": (XqaCase((90, 200), window_left=40, **DRAFTS), "4x3x16x1a1", 0),
    "queries of several tokens": (XqaCase((90, 200), heads=(4, 1), **DRAFTS), "2x3x16x1c4a1", SOME),
    "windows of unequal queries": (XqaCase((90, 200), window_left=40, **DRAFTS), "4x3x16x1c4a1", 0),
}
EARLY = r"(@p ld\.relaxed\.gpu\.global\.b32 t0, \[[^]]*\];)"


def read_bytes(ptx: str) -> str:
    assert "prefetch.global.L2 [" in ptx
    return ptx.replace("prefetch.global.L2 ", "ld.relaxed.gpu.global.u8 %early, ").replace(
        ".reg .pred", ".reg .b16 %early;\n.reg .pred", 1
    )


def stale(garbage: str, spared: int = 0) -> Callable[[str], str]:
    """Lengths, page numbers and their place are other numbers before griddepcontrol.wait, but for those of the first
    loads."""

    def rewrite(ptx: str) -> str:
        parts = re.split(EARLY, ptx)  # the loads, and what is between
        assert len(parts) > 2 * max(spared, 2) + 2
        parts[2 * spared + 1 :: 2] = [f"{load} @p xor.b32 t0, t0, {garbage};" for load in parts[2 * spared + 1 :: 2]]
        return read_bytes("".join(parts))

    return rewrite


class Reads(NamedTuple):
    """Addresses of K and V that a call fetches into L2, and those of the 16 bytes that it copies, with their number."""

    fetched: set[int]
    copied: Counter[int]


def reads(name: str, built: Built, rewrite: Any, schedule: str, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What a call reads, which is right."""
    _, ring, _ = CASES[name]
    spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in built.arguments["kv_cache"]]
    found = Reads(set(), Counter())
    load = access.load_global

    def recorded(batch: Any, mask: Any, addresses: Any, nbytes: int, what: str, strong: bool = False) -> Any:
        if nbytes == 1 or what == "cp.async":
            lanes = np.asarray(batch.full(addresses))[batch.lanes(mask)]
            cached = [int(a) for a in lanes if any(low <= a < high for low, high in spans)]
            (found.fetched if nbytes == 1 else found.copied).update(cached)
        return load(batch, mask, addresses, nbytes, what, strong)

    monkeypatch.setattr(access, "load_global", recorded)
    gpu = emulator.using("sm_90a", sms=16 if "c4" in ring else 2, schedule=Schedule(schedule, 1), rewrite=rewrite)
    with forced_ring(ring, built.case, Shape(200, keys=201)), gpu as emulation:
        assert built.check(*decode(built)) == ""
    assert emulation.records[0].spec["prefetch"] == int(ring.partition("a")[2] or 0)
    return found


def rows(built: Built, step: int, cols: int = 1, most: int = ALL) -> set[int]:
    """Addresses of every `step` bytes of the rows of K and V that queries see, up to `most` from the beginning of the
    tile of `cols` rows that has the first one."""
    case, table = built.case, built.arguments["block_tables"]
    found: set[int] = set()
    for cache in built.arguments["kv_cache"]:
        for request, kv_len in enumerate(case.seq_lens):
            first = max(0, kv_len - case.qo_lens[request] - case.window_left) if case.window_left >= 0 else 0
            for token in range(first, min(kv_len, first // cols * cols + most)):
                page, slot = divmod(token, case.page_size)
                for head in range(case.heads[1]):
                    row = cache[int(table[request, page]), slot, head]
                    found.update(range(row.data_ptr(), row.data_ptr() + row.nbytes, step))
    return found


@pytest.mark.parametrize("name", CASES)
def test_keys_that_queries_see_are_fetched_and_copied_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, ring, keys = CASES[name]
    built = build(case)
    found = reads(name, built, read_bytes, "adversarial", monkeypatch)
    if keys < 0:
        assert set() < found.fetched < rows(built, 64)
    else:
        assert found.fetched == rows(built, 64, int(ring.split("x")[2]), keys)
    qo_heads, kv_heads = built.case.heads
    blocks = -(-built.case.q_len * (qo_heads // kv_heads) // 8)  # of query rows, of which each reads all keys
    once = Counter(dict.fromkeys(rows(built, 16), blocks))
    assert once < found.copied if keys == AGAIN else once == found.copied


@pytest.mark.parametrize(("garbage", "schedule"), [("0x5A5A5A5A", "eager"), ("3", "delayed"), ("0x80000000", "eager")])
@pytest.mark.parametrize("name", CASES)
def test_stale_lengths_and_pages_stay_in_bounds(
    name: str, garbage: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(CASES[name][0])
    found = reads(name, built, stale(garbage), schedule, monkeypatch)
    assert all(found.copied[address] for address in rows(built, 16))


@pytest.mark.parametrize("spared", [0, 4])  # two places and two lengths of each lane: page numbers alone are stale
def test_stale_places_of_a_plan(spared: int) -> None:
    """It tells where the pages of a request begin."""
    with emulator.using("sm_90a", kernels="xqa", sms=22, rewrite=stale("0x5A5A5A5A", spared)) as emulation:
        Solver(batch_case.decode((300, 90), **heads(6, 3), **dims(128)), backend="emulator").assert_right()
    assert {record.spec["work"] for record in emulation.records} == {"cluster"}
