"""The decode kernel on tcgen05, on the emulator: few SMs, so that segments are cut, joined and shared."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch

from cute_attn import emulator
from cute_attn.emulator import EmulatorError
from cute_attn.emulator.machine import Schedule
from cute_attn.kernels.xqa.umma import tiles
from cute_attn.runtime.arch import named
from tests.emulator.test_xqa import decode
from tests.support import batch_case
from tests.support.batch_case import E4M3, BatchCase, heads
from tests.support.right import assert_solved
from tests.support.schedules import KINDS, in_turn
from tests.support.xqa_case import Built, XqaCase, build

ARCH = "sm_100a"


def solve(built: Built, sms: int, schedule: str) -> str:
    """ "" if the kernel solves the case on a GPU of so many SMs, else what is wrong."""
    with emulator.using(ARCH, sms=sms, schedule=Schedule(schedule, built.case.seed)) as emulation:
        out, lse = decode(built)
    assert [record.spec["kernel"] for record in emulation.records] == ["xqa_umma"]  # one launch
    return built.check(out, lse)


# SMs and case, of more than 16 packed rows.
CASES = {
    "lengths at the edges of tiles": (3, XqaCase((0, 1, 127, 128, 129, 256, 0), heads=(20, 1), seed=1)),
    "head dim 64, pages of a token": (
        2, XqaCase((300, 70, 1), "fp16", "fp16", (20, 1), 64, page_size=1, sinks=True)
    ),
    "head dim 256, scores that raise anchors": (3, XqaCase((300, 70), heads=(12, 1), head_dim=256, bmm1_scale=-3.0)),
    "scores that raise anchors of 64 rows": (2, XqaCase((700,), heads=(64, 1), page_size=3, bmm1_scale=5.0)),
    "blocks of rows, strided caches": (
        7, XqaCase((260, 90), heads=(80, 2), q_len=2, kv_layout="HND", form="tensor", page_size=64)
    ),
    "drafts longer than the keys": (3, XqaCase((300, 131, 3), heads=(4, 1), q_len=5, seed=3)),
    "ragged drafts under a tree": (
        3, XqaCase((300, 131, 129, 5), heads=(8, 2), q_len=5, q_lens=(5, 1, 3, 0), mask=True, seed=3)
    ),
    "a tree beyond a tile, a window": (1, XqaCase((300, 40), heads=(2, 1), q_len=33, mask=True, window_left=50)),
    "a window that begins at a tile": (3, XqaCase((512, 383, 257), heads=(8, 1), q_len=4, window_left=127, sinks=True)),
    "a window of the row's own token": (2, XqaCase((500, 129), heads=(8, 1), q_len=4, window_left=0)),
    "more requests than lanes": (5, XqaCase(tuple(range(1, 35)), heads=(17, 1), head_dim=64)),
    "nothing to see": (2, XqaCase((0, 0), heads=(20, 1), sinks=True)),
    "fp8 outputs, scales on the device": (
        3, XqaCase((400, 3), heads=(16, 2), q_len=3, bmm1_scale=0.0, out="e4m3", device_scales=True, bmm2_scale=-3.0)
    ),
    "fp8 caches, rows of q to fp16": (
        3, XqaCase((300, 7, 0, 129), kv="e4m3", heads=(80, 2), window_left=150, sinks=True)
    ),
    "fp8 caches, head dim 64, fp16 q": (1, XqaCase((300, 130), "e5m2", "fp16", (40, 1), 64, page_size=1, seed=2)),
    "fp8 caches, head dim 256": (3, XqaCase((300, 129), kv="e4m3", heads=(24, 1), head_dim=256, bmm1_scale=-3.0)),
    "fp8 caches, blocks of rows under a tree": (
        3, XqaCase((400, 150), kv="e4m3", heads=(8, 1), q_len=9, mask=True, page_size=3, bmm1_scale=-2.0)
    ),
    "fp8 caches, more requests than lanes": (2, XqaCase(tuple(range(1, 35)), kv="e4m3", heads=(33, 1), head_dim=64)),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize(("name", "schedule"), in_turn(CASES, KINDS, lambda name: CASES[name][1].kv))
def test_case(name: str, schedule: str) -> None:
    sms, case = CASES[name]
    assert solve(build(case), sms, schedule) == ""


@pytest.mark.emulator
@pytest.mark.parametrize("schedule", KINDS)
def test_keys_that_no_row_sees(schedule: str) -> None:
    """K of a draft token that a tree hides from all rows may hold anything."""
    case = XqaCase((300,), heads=(8, 1), q_len=4, mask=True, page_size=1, seed=2)
    built = build(case)
    assert built.mask_bits is not None
    built.mask_bits[:, 2] = False
    bits = built.arguments["mask"].view(torch.int16)
    bits[:] = bits & ~0b100
    page = int(built.arguments["block_tables"][0, 298])
    built.arguments["kv_cache"][0][page] = math.nan
    assert solve(built, 2, schedule) == ""


def rewritten(built: Built, keys: Callable[[torch.Tensor], torch.Tensor], query: float) -> Built:
    """Changes the keys of request 0, [kv_len, num_kv_heads, head_dim], and multiplies every other row of q."""
    cache, (table, page) = built.arguments["kv_cache"][0], (built.arguments["block_tables"][0], built.case.page_size)
    token = torch.arange(len(built.keys[0]))
    where = table[token // page], token % page
    found = keys(cache[where].float()).to(cache.dtype)
    cache.view(torch.uint8)[where] = found.view(torch.uint8)
    built.keys[0] = found.double()
    built.arguments["query"][:, ::2] *= query
    built.query[:, ::2] = built.arguments["query"].double()[:, ::2]
    return built


def rising(k: torch.Tensor, base: float = 2.0) -> torch.Tensor:
    """Outputs and sums of all tiles before are rescaled; in some columns only where other rows of q are small."""
    return k * base ** (torch.arange(len(k)) // 128).view(-1, 1, 1)


def one_above(k: torch.Tensor) -> torch.Tensor:
    """All keys are equal, but the first: 2^12 times as probable in rows of ones, as many others together."""
    flat = torch.zeros_like(k)
    flat[0, :, 0] = 12.0
    return flat


# Scores that strain anchors, over fp8 caches also terms of e4m3 and e5m2: case, keys, factor of every other row of q.
STRAINED: dict[str, tuple[XqaCase, Callable[[torch.Tensor], torch.Tensor], float]] = {
    "rise from tile to tile, 16 bits": (
        XqaCase((640,), heads=(20, 1), page_size=128, seed=4), functools.partial(rising, base=4.0), 1 / 64
    ),
    "rise from tile to tile": (XqaCase((640,), kv="e4m3", heads=(20, 1), page_size=128, seed=4), rising, 1 / 16),
    "one key above many": (
        XqaCase((3000,), kv="e4m3", heads=(20, 1), head_dim=64, bmm1_scale=math.log(2), seed=5), one_above, 1.0
    ),
    "huge": (XqaCase((300,), kv="e5m2", heads=(24, 1), bmm1_scale=30.0, seed=6), rising, 1.0),
    "small rows beside large ones": (XqaCase((300,), "e4m3", "fp16", (40, 1), seed=7), rising, 2.0**-9),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("strain", STRAINED)
def test_strained_scores(strain: str) -> None:
    case, keys, factor = STRAINED[strain]
    built = build(case)
    if keys is one_above:  # values of one sign, whose errors would add up
        built.arguments["query"][:] = built.query[:] = 1.0
        cache = built.arguments["kv_cache"][1]
        cache.view(torch.uint8)[:] = (
            torch.where(cache.float().isnan(), math.nan, cache.float().abs()).to(cache.dtype).view(torch.uint8)
        )
        built.values[0] = abs(built.values[0])
    assert solve(rewritten(built, keys, factor), 2, "adversarial") == ""


BATCHES = (
    batch_case.decode((300, 33, 0), page_size=5, cache="strided", window_left=200, sinks=True, **heads(34, 2)),
    batch_case.decode((200, 2), kv_dtype=E4M3, q_len=5, k_scale=1.5, v_scale=-1.25, tensor_scales=True, **heads(8, 1)),
)


@pytest.mark.emulator
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.id)
def test_batch_wrapper(batch: BatchCase) -> None:
    with emulator.using(ARCH, kernels="xqa", schedule=Schedule("adversarial", 1), sms=3) as emulation:
        assert_solved(batch, backend="emulator")
    assert [record.spec["kernel"] for record in emulation.records] == ["xqa_umma"]


FAULTS = {
    "products read K and V of the generic proxy": ("fence.proxy.async.shared::cta;", "", "proxy"),
    "scores are overwritten while they are read": ("tcgen05.fence::before_thread_sync;", "", "tensor memory"),
    "scores are read before they are complete": ("tcgen05.wait::ld.sync.aligned;", "", "wait::ld"),
}


@pytest.mark.emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(fault: str) -> None:
    old, new, message = FAULTS[fault]
    built = build(XqaCase((300,), heads=(20, 1)))
    with emulator.using(ARCH, sms=1, rewrite=lambda ptx: ptx.replace(old, new)), pytest.raises(EmulatorError) as error:
        decode(built)
    assert message in str(error.value)


@pytest.mark.emulator
def test_other_problems_run_on_the_other_kernel() -> None:
    for case in (
        XqaCase((40,), heads=(16, 1)),
        XqaCase((40,), heads=(20, 1), head_dim=80),
        XqaCase((40,), kv="e4m3", heads=(16, 1)),
    ):
        built = build(case)
        with emulator.using(ARCH, sms=2) as emulation:
            assert built.check(*decode(built)) == ""
        assert [record.spec["kernel"] for record in emulation.records] == ["xqa"]


@pytest.mark.parametrize("arch", tiles.ARCHS)
def test_rows_of_the_tile_table(arch: str) -> None:
    """Few rows are padded, many are cut into blocks; slots leave 64 KB in flight while K of a tile is read."""
    for head_dim, most in tiles.MAX_ROWS.items():
        for packed_rows in (16, 17, 33, 65, 1000):
            spec = tiles.choose("bfloat16", "", "bfloat16", head_dim, packed_rows, False, named(arch))
            fp8 = tiles.choose("bfloat16", "float8_e4m3fn", "bfloat16", head_dim, packed_rows, False, named(arch))
            assert min(packed_rows, most) <= spec.rows == fp8.rows <= most
            assert (spec.stages - spec.pieces) * 128 * spec.piece_dim * 2 >= 64 << 10
            assert (fp8.stages - fp8.pieces) * 128 * spec.piece_dim >= 64 << 10
