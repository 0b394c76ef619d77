"""Persistent kernels, fa3 and fa4, from their PTX, over their host code and tensor maps, against the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cute_attn import (
    BatchPrefillWithRaggedKVCacheWrapper,
    LayoutError,
    NotSupported,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from cute_attn.emulator import Schedule, using
from cute_attn.kernels.host.persistent import family as persistent_family
from cute_attn.kernels.host.prepared import prepared
from cute_attn.schedule import batch as batch_schedule
from tests.support import batch_case
from tests.support.batch_case import BatchCase, dims, heads, paged, ragged
from tests.support.cover import needed
from tests.support.matrix import BF16, CAUSAL, E4M3, SMALL, prefill
from tests.support.persistent_emulated import (
    BATCHES,
    GATHERED,
    LONG,
    TARGETS,
    Target,
    assert_cut,
    name,
    solve_on,
)
from tests.support.right import Solver, assert_right, emulate_call, executed, families, launched
from tests.support.schedules import SCHEDULES, in_turn, structure, way_of_keys

pytestmark = pytest.mark.emulator

KERNELS = (("fa2", "sm_90a"), *(target.on for target in TARGETS))


def needed_of(target: Target) -> list[BatchCase]:
    """What a target needs of the problems that it takes, besides long ones, which run on all targets."""
    small, long = (
        [x for x in problems if target.takes(x)]
        for problems in ((*SMALL, *batch_case.SMALL), (*LONG, *BATCHES, *GATHERED))
    )
    return needed(small, batch_case.features, long)


NEEDED = {target: needed_of(target) for target in TARGETS}
DEALT = [(target, *turn) for target in TARGETS for turn in in_turn(NEEDED[target], target.schedules, structure)]


def scheduled(problems: Sequence[BatchCase]) -> list[tuple[Target, BatchCase, Schedule]]:
    """Every problem on every target, with asynchronous schedules in turn, and the first problem of a structure that no
    smaller one has with both of them.
    """
    seen = {target: frozenset[Any]().union(*map(structure, NEEDED[target])) for target in TARGETS}
    return [(target, *turn) for target in TARGETS for turn in in_turn(problems, SCHEDULES, structure, seen[target])]


@pytest.mark.parametrize(("target", "problem", "schedule"), DEALT, ids=name)
def test_small(target: Target, problem: BatchCase, schedule: Schedule) -> None:
    solve_on(target, problem, schedule)


@pytest.mark.parametrize(("target", "problem", "schedule"), scheduled((*LONG, *BATCHES)), ids=name)
def test_long(target: Target, problem: BatchCase, schedule: Schedule) -> None:
    assert solve_on(target, problem, schedule, sms=3).records


@pytest.mark.parametrize(("batch", "schedule"), in_turn(GATHERED, structure=way_of_keys), ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_gathered_pages(target: Target, batch: BatchCase, schedule: Schedule) -> None:
    emulation = solve_on(target, batch, schedule, sms=3)
    assert {record.spec["kv"] for record in launched(emulation)} == {"gathered"}


def recomputing(target: Target, *qkv: torch.Tensor, **arguments: Any) -> int:
    """The number of instructions of a prefill call, whose result is right, of which recomputed tiles run more."""
    return executed(emulate_call(single_prefill_with_kv_cache, *qkv, on=target.on, **arguments), target.recomputes)


LEAPS = ((64, torch.float16), (128, torch.bfloat16), (256, torch.float16), (64, torch.bfloat16))


@pytest.mark.parametrize(("leap", "schedule"), in_turn(LEAPS, SCHEDULES), ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_scores_that_leap(target: Target, leap: tuple[int, torch.dtype], schedule: Schedule) -> None:
    """Scores far above the anchors of earlier tiles, beyond fp32: the tile is recomputed, and only then."""
    (head_dim, dtype), generator = leap, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, head_dim, generator=generator).to(dtype) for n in (100, 700, 700))
    ran = []
    for scale in (1, 300):
        k[:100] *= scale  # seen last
        ran.append(recomputing(target, q, k, v, schedule=schedule, sms=2, near=2e-2, causal=True))
    assert ran[0] < ran[1]


@pytest.mark.parametrize("target", TARGETS, ids=name)
@pytest.mark.parametrize(("rise", "schedule"), [(17, SCHEDULES[1]), (60, Schedule())], ids=name)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_one_row_that_rises(target: Target, masked: bool, rise: int, schedule: Schedule) -> None:
    """One row rises by powers of two that fit fp32 but not fp16, so that one warp of four sees it."""
    q, k, v = (torch.randn(n, 1, 64, generator=torch.Generator().manual_seed(n)) for n in (150, 500, 501))
    row = q[100] / q[100].norm()
    q[100] = 8 * row  # 8 / sqrt(64) times what a key has of it is its score
    k -= (k * row).sum(-1, keepdim=True) * row
    q, k, v = q.half(), k.half(), v[:500].half()
    keep = torch.rand(150, 500, generator=torch.Generator().manual_seed(0)) < 0.7
    keep[100, 30], keep[:, :3] = True, False
    mask = keep if masked else None
    ran = []
    for scale in (0.01, 1):
        k[30] = (rise * math.log(2) * row * scale).half()
        ran.append(recomputing(target, q, k, v, schedule=schedule, sms=1, custom_mask=mask))
    assert ran[0] < ran[1]


@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_rows_that_see_nothing_yet(target: Target) -> None:
    """Tiles that hide everything from some rows are not recomputed for them."""
    q, k, v = (torch.randn(n, 1, 64, generator=torch.Generator().manual_seed(n)).half() for n in (70, 400, 400))
    ran = []
    for hidden in ([], [7]):
        keep = torch.ones(70, 400, dtype=torch.bool)
        keep[hidden] = False
        ran.append(recomputing(target, q, k, v, custom_mask=keep))
    assert ran[0] == ran[1]


@pytest.mark.parametrize("on", KERNELS, ids="-".join)
@pytest.mark.parametrize("cap", [1e-50, 1e-39, 1e38])
def test_caps_without_a_reciprocal(on: tuple[str, str], cap: float) -> None:
    """Soft caps whose inverse is infinite or 0 in fp32."""
    q, k, v = (torch.randn(n, 1, 64, generator=torch.Generator().manual_seed(n)).half() for n in (20, 70, 70))
    q[3] = 0.0
    emulate_call(single_prefill_with_kv_cache, q, k, v, on=on, logits_soft_cap=cap)


@pytest.mark.parametrize(("kernels", "arch"), KERNELS)
def test_scale_below_fp32(kernels: str, arch: str) -> None:
    """A scale that would be 0 as a factor of the exponent, and turn hidden scores into NaN."""
    q, k, v = (torch.randn(n, 1, 64, generator=torch.Generator().manual_seed(n)).half() for n in (70, 90, 90))
    emulate_call(single_prefill_with_kv_cache, q, k, v, on=(kernels, arch), causal=True, sm_scale=1e-50)
    with using(arch, kernels=kernels):
        planned = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="emulator")
        planned.plan(*(torch.tensor([0, n], dtype=torch.int32) for n in (70, 90)), 1, 1, 64, causal=True)
        out = planned.run(q, k, v, q_scale=1e-50)
    expected = single_prefill_with_kv_cache(q, k, v, causal=True, sm_scale=1e-50, backend="reference")
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("kernels", "arch"), [*KERNELS, ("xqa", "sm_90a")])
def test_large_logits(kernels: str, arch: str) -> None:
    """Up to 1e8, the documented limit, where the spacing of fp32 is 8."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 70, 2, 64, generator=generator).bfloat16()
    q, k = q * 2.0**12, k * 2.0**12
    call, q = (single_decode_with_kv_cache, q[-1]) if kernels == "xqa" else (single_prefill_with_kv_cache, q)
    _, lse = call(q, k, v, return_lse=True, backend="reference")
    assert 5e7 < lse.abs().max() < 5e8
    emulate_call(call, q, k, v, on=(kernels, arch), near=1.6e-2, lse_near=1e-5)


@pytest.mark.parametrize(("kernels", "arch"), [("reference", ""), *KERNELS])
@pytest.mark.parametrize("factor", [2.0**30, 2.0**120])
def test_larger_logits_of_one_row_leave_the_others_alone(kernels: str, arch: str, factor: float) -> None:
    """The second factor makes products beyond fp32; the reference computes them too."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 70, 2, 64, generator=generator).bfloat16()
    others = torch.arange(70) != 20

    def call() -> torch.Tensor:
        if kernels == "reference":
            return single_prefill_with_kv_cache(q, k, v, backend="reference")
        with using(arch, kernels=kernels):
            return single_prefill_with_kv_cache(q, k, v, backend="emulator")

    expected = call()
    q[20] *= factor
    out = call()
    torch.testing.assert_close(out[others], expected[others], rtol=1e-2, atol=1e-2)
    if kernels == "reference":
        best = (q[20].double()[:, None] @ k.double().permute(1, 2, 0))[:, 0].argmax(-1)
        assert torch.equal(out[20], v[best, torch.arange(2)])


SECTIONED = (
    ragged((200, 0, 37, 1), (300, 20, 64, 0), mask="causal", **heads(6, 3)),
    paged((150, 0, 37, 1), (300, 20, 64, 0), page_size=16, mask="causal", dtype="bfloat16", **dims(128), **heads(4, 2)),
    paged((150, 20), (300, 40), page_size=5, window_left=30, **heads(3, 3)),
)


@pytest.mark.parametrize(("target", "batch", "schedule"), scheduled(SECTIONED), ids=name)
def test_batches_in_sections(
    target: Target, batch: BatchCase, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders tiles by kv head, then by request."""
    for name_of_bytes in ("SECTION_BYTES", "SHORT_SECTION_BYTES"):
        monkeypatch.setattr(persistent_family, name_of_bytes, 1 << 11)  # keys of a few tokens
    monkeypatch.setattr(batch_schedule, "L2_ORDER_MIN_WAVES", 1)
    prepared.cache_clear()
    with using(target.arch, kernels=target.kernels, schedule=schedule, sms=2) as emulation:
        solver = Solver(batch, backend="emulator")
        results = solver.call()
    prepared.cache_clear()
    assert_right(batch, solver.inputs, *results)
    assert set(families(emulation)) <= {target.kernels, "combine"}
    plan = solver.wrapper._planned().launch.planned.schedule
    *_, heads_per_section, _, _ = persistent_family.batch_order(
        plan.tiling.params, plan.room.capacity.items, plan.room.capacity.merges
    )
    assert heads_per_section < plan.tiling.params.num_kv_heads


@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_sections_of_single_requests(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_family, "SECTION_BYTES", 1)
    problem = prefill(150, 200, (6, 3), 64, **CAUSAL, seed=1)  # its schedule is not cached yet
    solve_on(target, problem, Schedule(), sms=4)


CUT = (
    prefill(3, 1500, (8, 2), 128, **BF16, **CAUSAL),
    prefill(3, 1500, (8, 2), 128, **BF16),
    prefill(3, 900, (8, 2), 128, **E4M3, **CAUSAL),
    *(paged((5,), (1100,), page_size, mask="causal", **heads(2, 1)) for page_size in (16, 5)),
)


@pytest.mark.parametrize(("problem", "schedule"), in_turn(CUT, SCHEDULES), ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_cut_keys(target: Target, problem: BatchCase, schedule: Schedule) -> None:
    """Short requests, whose heads share a tile, over keys that several CTAs divide."""
    assert_cut(target, solve_on(target, problem, schedule, sms=16))


@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_the_kernels_of_auto(target: Target) -> None:
    """Takes the backends of such a GPU: persistent kernels for many rows, fa2 for few; `kernels` overrides it."""
    own = target.kernels
    for qo_len, kernels, ran in ((65, "auto", own), (3, "auto", "fa2"), (3, own, own), (65, "fa2", "fa2")):
        problem = prefill(qo_len, 20, (1, 1))
        with using(target.arch, kernels=kernels) as emulation:
            batch_case.call(problem, batch_case.make(problem), backend="emulator")
        assert [record.spec["kernel"] for record in emulation.records] == [ran]


@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_expanded_keys(target: Target) -> None:
    """Tensor maps have no strides of 0: another backend takes expanded keys, and an existing plan refuses them."""
    q, kv = torch.randn(70, 4, 64).half(), torch.randn(70, 1, 64).half()
    k, v = kv.expand(70, 2, 64), kv.flip(0).expand(70, 2, 64)
    with using(target.arch) as emulation:
        out = single_prefill_with_kv_cache(q, k, v, backend="emulator")
    assert [record.spec["kernel"] for record in emulation.records] == ["fa2"]
    expected = single_prefill_with_kv_cache(q, k.contiguous(), v.contiguous(), backend="reference")
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
    ends = torch.tensor([0, 70], dtype=torch.int32)
    planned = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="emulator")
    with using(target.arch, kernels=target.kernels):
        with pytest.raises(NotSupported, match="refuses expanded q, k or v"):
            single_prefill_with_kv_cache(q, k, v, backend="emulator")
        planned.plan(ends, ends, 4, 2, 64)
        with pytest.raises(NotSupported, match="refuses expanded q, k or v"):
            planned.run(q, k, v)
        got = planned.run(q, k.contiguous(), v.contiguous())
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kernels", ["reference", "emulator", "fa9"])
def test_whose_kernels(kernels: str) -> None:
    one = torch.zeros(1, 1, 64).half()
    with using("sm_90a", kernels=kernels), pytest.raises(LayoutError, match=kernels):
        single_prefill_with_kv_cache(one, one, one, backend="emulator")
