"""The XQA kernel behind wrappers and single decode, on the emulator."""

from __future__ import annotations

import math

import pytest
import torch

from cute_attn import NotSupported, single_decode_with_kv_cache
from cute_attn.emulator import Schedule, using
from cute_attn.emulator.settings import Emulation
from cute_attn.kernels.xqa import tiles
from cute_attn.request import caches
from tests.support import batch_case
from tests.support.batch_case import E4M3, BatchCase, decode, dims, heads
from tests.support.cover import needed
from tests.support.graphs import Captured, emulated_graph, graph_wrapper
from tests.support.honour import CALLS, IDS, Perturbation, honour
from tests.support.matrix import SMALL as MATRIX
from tests.support.matrix import decode as request
from tests.support.right import Solver, assert_planned_right, emulate, emulate_call
from tests.support.schedules import KINDS, in_turn
from tests.support.xqa_batches import GRAPHED, SMALL, is_taken, random_batches
from tests.support.xqa_rules import NO_CLUSTERS, move_steps

pytestmark = pytest.mark.emulator

DECODE_CALLS = {name: call for name, call in zip(IDS, CALLS, strict=True) if "decode" in call[0]}
BATCHES = needed(SMALL, batch_case.features)
SINGLE = [problem for problem in MATRIX if problem.kind == "single_decode" and is_taken(problem)]
SINGLE += [request(150, (4, 1), dim, storage="padded") for dim in (512, 32)]
SINGLE += [
    request(kv_len, (8, 2), 128, dtype="bfloat16", kv_dtype=E4M3, kv_layout=kv_layout)
    for kv_len, kv_layout in ((0, "NHD"), (1, "HND"), (300, "NHD"), (77, "HND"))
]


def assert_xqa(emulation: Emulation) -> None:
    assert {record.spec["kernel"] for record in emulation.records} <= {"xqa"}


def solve(batch: BatchCase, sms: int, schedule: Schedule) -> Emulation:
    with using("sm_90a", kernels="xqa", schedule=schedule, sms=sms) as emulation:
        solver = Solver(batch, backend="emulator")
        first, second = solver.assert_right(), solver.call()  # the second passes addresses alone
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_xqa(emulation)
    return emulation


@pytest.mark.parametrize(("batch", "schedule"), in_turn(BATCHES, KINDS), ids=lambda x: getattr(x, "id", x))
def test_batch(batch: BatchCase, schedule: str) -> None:
    assert len(solve(batch, 2, Schedule(schedule, 1)).records) == 2 * bool(batch.rows)


@pytest.mark.parametrize("seed", range(4))
def test_random_batch(seed: int) -> None:
    batch = next(random_batches(seed, 120, 4))
    solve(batch, (1, 2, 5, 3)[seed], Schedule(KINDS[seed % 3], seed))


@pytest.mark.parametrize(("kind", "perturbation"), [*DECODE_CALLS.values()], ids=[*DECODE_CALLS])
def test_honour(kind: str, perturbation: Perturbation) -> None:
    with using("sm_90a", kernels="xqa", sms=1) as emulation:
        honour(kind, perturbation, "emulator", "cpu", None)
    assert_xqa(emulation)


# ---- single requests


@pytest.mark.parametrize("problem", SINGLE, ids=lambda problem: problem.id)
def test_single(problem: BatchCase) -> None:
    assert_xqa(emulate(problem, "sm_90a", "xqa", sms=2))


@pytest.mark.parametrize("schedule", KINDS)
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_scores_that_rise(kv_dtype: torch.dtype, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tile after tile above the anchors of those before, of one query head more than of the others."""
    # Several tiles a warp.
    move_steps(monkeypatch, keys={145: 1, 513: 1, 1025: 1}, **NO_CLUSTERS)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 64, generator=generator).half()
    k, v = (torch.randn(900, 1, 64, generator=generator).to(kv_dtype) for _ in "kv")
    step = torch.arange(900)[:, None, None] / 900
    k = (k.float() + 4 * step * q[2].float()).to(kv_dtype)
    on = ("xqa", "sm_90a")
    assert_xqa(emulate_call(single_decode_with_kv_cache, q, k, v, on=on, schedule=Schedule(schedule, 1), sms=2))


# ---- plans


def test_replays_of_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clusters, which merge in shared memory: partial results of CTAs are in the workspace."""
    move_steps(monkeypatch, **NO_CLUSTERS)
    with using("sm_90a", kernels="xqa", sms=2) as emulation:
        captured = Captured(GRAPHED[0], "cpu", emulated_graph, backend="emulator")
        for seed in range(3):
            captured.replay(batch_case.random_lengths(GRAPHED[0], seed, max(GRAPHED[0].kv_lens)))
    assert {record.spec["work"] for record in emulation.records} == {"shares"}


def test_a_smaller_workspace_means_fewer_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    move_steps(monkeypatch, **NO_CLUSTERS)
    batch = decode((600, 40), kv_dtype="nvfp4", **heads(4, 2))
    inputs = batch_case.make(batch)
    grids = []
    with using("sm_90a", kernels="xqa", sms=4) as emulation:
        planned = batch_case.wrapper(batch, backend="emulator")
        wanted, _ = planned.workspace_size(**batch_case.plan_arguments(batch, inputs))
        for size in (wanted, wanted // 2, 16):
            planned.reset_workspace_buffer(torch.empty(size, dtype=torch.uint8))
            assert_planned_right(batch, planned)
            grids.append(math.prod(emulation.records[-1].grid))
    assert grids[0] > grids[1] > grids[2] == 1


EVEN, UNEVEN, OTHER_EVEN = (130, 150, 141), (40, 300, 77), (90, 81, 85)


@pytest.mark.parametrize("schedule", [*KINDS, "captured"])
def test_one_kernel_takes_requests_of_any_lengths(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps with units of their own, which requests of equal lengths are for."""
    keys = {145: 1, 513: 1, 1025: 1}  # no length is for CTAs of a segment
    move_steps(monkeypatch, pairs={tiles.FEW + 1: 6, tiles.EVEN: 6}, keys=keys, **NO_CLUSTERS)
    batches = [decode(lens, kv_dtype=E4M3, **heads(8, 2), **dims(128)) for lens in (EVEN, UNEVEN, OTHER_EVEN)]
    captured, kind = schedule == "captured", KINDS[0] if schedule == "captured" else schedule
    with using("sm_90a", kernels="xqa", sms=1 + captured, schedule=Schedule(kind, 1)) as emulation:
        planned = batch_case.wrapper(batches[0], backend="emulator")
        if captured:
            planned, _ = graph_wrapper(batches[0], "cpu", 40, 0, backend="emulator")
        for batch in batches:
            assert_planned_right(batch, planned)
    assert {record.spec["work"] for record in emulation.records} == {"even"}
    assert len({(str(record.spec), record.grid) for record in emulation.records}) == 1


def test_caches_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = decode((20, 7), kv_dtype="nvfp4", **heads(2, 1), **dims(128))
    inputs = batch_case.make(batch)
    with using("sm_90a", kernels="xqa", sms=1):
        planned = batch_case.wrapper(batch, backend="emulator")
        planned.plan(**batch_case.plan_arguments(batch, inputs))
        with monkeypatch.context() as patch:
            patch.setattr(caches, "LARGE_CACHE", inputs.kv[0][0].nbytes)
            with pytest.raises(NotSupported, match="emulator refuses paged k or v that span 64 GiB"):
                planned.run(inputs.q, *inputs.kv, kv_cache_sf=inputs.kv_cache_sf)
        loose = tuple(
            torch.nn.functional.pad(x.view(torch.uint8), (0, 4))[..., :8].view(x.dtype) for x in inputs.kv_cache_sf
        )
        with pytest.raises(NotSupported, match="emulator refuses block scales"):
            planned.run(inputs.q, *inputs.kv, kv_cache_sf=loose)
