"""The host side of fa2: launches, their parameters and workspaces. What usual calls launch:
`tests/api/test_launch_corpus.py`; numbers of the kernels: `tests/emulator`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn import WorkspaceError
from cute_attn.dispatch import capabilities, select
from cute_attn.kernels.fa2.host import family as fa2_family
from cute_attn.kernels.fa2.host.family import FAMILY
from cute_attn.kernels.fa2.spec import Fa2Spec, Tile
from cute_attn.kernels.host import gpu as gpus
from cute_attn.kernels.host.family import SplitKvBatchRun
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.rules import Rule
from cute_attn.problem import Extras, Problem
from cute_attn.request import single as single_request
from cute_attn.runtime.arch import named
from cute_attn.runtime.staging import Staging
from tests.support.batch_case import (
    BatchCase,
    call,
    decode,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    random_lengths,
    wrapper,
)
from tests.support.graphs import graph_wrapper
from tests.support.named_launches import NamedLaunch, recorded
from tests.support.right import Built, build

GPU = Gpu(named("sm_90a"), 0, 66)
TILE = Tile(16, 16, 1, 1, 2)  # small: small problems then have many
SMALL = Rule(lambda *_: TILE, {})
DECODE = decode((40, 3, 0), page_size=4, **heads(4, 2))
LONG = ragged((1, 1, 1), (40, 0, 900), **heads(6, 2))  # whose last request is cut


@pytest.fixture(autouse=True)
def on_fa2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches of small tiles, recorded."""
    monkeypatch.setattr(fa2_family.tiles, "rule_of", lambda *args: SMALL)
    monkeypatch.setattr(fa2_family.tiles, "resident_ctas", lambda *args: 2)
    monkeypatch.setattr(gpus, "of_device", lambda index: GPU)
    monkeypatch.setattr(select, "chosen", lambda features, name, *load: capabilities.BY_NAME["fa2"])
    monkeypatch.setattr(select, "reasons_against", lambda *args: [])
    with recorded():
        yield


# ---- single requests


def solve(problem: Problem, arch: str = "sm_90a") -> None:
    FAMILY.prepare(problem.settings, Gpu(named(arch), 0, 66))(problem)


def single(qo_len: int = 5, kv_len: int = 300, heads: tuple[int, int] = (6, 2), **arguments: Any) -> Problem:
    q, (k, v) = torch.randn(qo_len, heads[0], 64).half(), torch.randn(2, kv_len, heads[1], 64).half()
    return single_request.problem(single_request.Call(**{"q": q, "k": k, "v": v, "return_lse": True, **arguments}))


@pytest.mark.parametrize("kv_len", [40, 300], ids=["whole", "split"])
def test_scales_on_the_device(kv_len: int) -> None:
    """Their sign is unknown. Kernels get their addresses; that of V's goes to the launch that writes the output."""
    problem, v_scale = single(kv_len=kv_len, v_scale=2.0, sm_scale=0.1), torch.tensor([0.25])
    scales = torch.tensor([-0.5]), torch.tensor(3.0)
    settings = problem.settings._replace(features=problem.settings.features._replace(positive_scale=False))
    solve(problem._replace(settings=settings, extras=Extras(*scales, v_scale)))
    main, last = NamedLaunch.fired[0], NamedLaunch.fired[-1]
    assert isinstance(main.spec, Fa2Spec)
    assert main.spec.scores == ("scale",)
    assert (main.params.scale0, main.params.scale1) == tuple(x.data_ptr() for x in scales)
    assert (last.params.v_scale_ptr, last.params.v_scale) == (v_scale.data_ptr(), 2.0)
    assert (main is last) == (kv_len == 40)
    assert main is last or (main.params.v_scale_ptr, main.params.v_scale) == (0, 1.0)


def test_no_query_tokens_launch_nothing() -> None:
    solve(single(qo_len=0))
    assert NamedLaunch.fired == []


@pytest.mark.parametrize(
    ("arch", "asked", "used"),
    [("sm_90a", None, True), ("sm_90a", False, False), ("sm_90a", True, True), ("sm_80", True, False)],
)
def test_pdl(arch: str, asked: bool | None, used: bool) -> None:
    solve(single(enable_pdl=asked), arch=arch)
    assert [launch.pdl for launch in NamedLaunch.fired] == [used, used]


def test_kernels_are_loaded_once() -> None:
    problem = single(qo_len=1)
    runner = FAMILY.prepare(problem.settings, GPU)
    for kv_len in (300, 290, 280):
        runner(problem._replace(kv_len=kv_len, k=problem.k[:kv_len], v=problem.v[:kv_len]))
    assert len({id(launch.artifact) for launch in NamedLaunch.fired}) == 2
    other = FAMILY.prepare(single(heads=(4, 4)).settings, GPU)
    other(single(heads=(4, 4)))
    assert len({id(launch.artifact) for launch in NamedLaunch.fired}) == 2  # head counts are no part of a spec


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({}, {"scores": (), "mask": "band", "kv_dtype": "", "pos_encoding": "none"}),
        ({"sm_scale": 0.0}, {"scores": ("scale",)}),
        ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 1.0}, {"scores": ("scale", "alibi", "soft_cap")}),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, {"scores": (), "pos_encoding": "rope"}),
        ({"custom_mask": torch.rand(5, 300) < 0.5, "causal": True}, {"mask": "packed"}),
    ],
)
def test_spec(arguments: dict[str, Any], fields: dict[str, Any]) -> None:
    """What a kernel does not need costs it nothing. That it has what it needs, numbers tell (`tests/emulator`)."""
    spec = FAMILY.spec(single(**arguments).settings, TILE, split=False)
    assert {name: getattr(spec, name) for name in fields} == fields


# ---- batches


def planned(built: Built, staging: Staging | None = None) -> SplitKvBatchRun[Any]:
    staging = staging or Staging(torch.device("cpu"))
    run = FAMILY.plan(built.problem.settings, built.lengths, built.limits, staging, GPU)
    staging.send()
    return run


def launched(case: BatchCase) -> Built:
    built = build(case)
    planned(built)(built.problem)
    return built


def test_launches_without_a_gpu() -> None:
    built = launched(LONG)
    _, expected = FAMILY.batch_launches(built.problem.settings, built.lengths, built.limits, GPU.arch, GPU.sms)
    assert expected == [(launch.spec, launch.grid) for launch in NamedLaunch.fired]


@pytest.mark.parametrize(
    ("case", "count"), [(dataclasses.replace(LONG, disable_split_kv=True), 1), (ragged((0, 0), (5, 0)), 0)]
)
def test_nothing_to_merge_or_to_do(case: BatchCase, count: int) -> None:
    launched(case)
    assert len(NamedLaunch.fired) == count


def test_scales_of_batches_on_the_device() -> None:
    """As a GPU's are: the kernels get their addresses."""
    built = build(LONG)
    settings, scales, v_scale = built.problem.settings, (torch.tensor([-0.5]), torch.tensor(3.0)), torch.tensor([0.25])
    settings = settings._replace(features=settings.features._replace(positive_scale=False))
    planned(built)(built.problem._replace(settings=settings, extras=Extras(*scales, v_scale)))
    main, combine = (launch.params for launch in NamedLaunch.fired)
    assert (main.scale0, main.scale1) == tuple(x.data_ptr() for x in scales)
    assert main.v_scale_ptr == combine.v_scale_ptr == v_scale.data_ptr()  # of whole segments, and of merged ones


def test_captured_launches_keep_their_records() -> None:
    """A graph captured before another workspace sees no later plan, but the records that it reads are still there."""
    case = ragged((30, 20, 5), (150,) * 3, mask="causal")
    inputs, (made, _) = make(case), graph_wrapper(case, "cpu", 30, 200)
    made.plan(**plan_arguments(case, inputs))
    call(case, inputs, made)
    (records, _), address = made._planned().launch.records, NamedLaunch.fired[0].params.items
    size = records.fill_(5).numel()  # as the planner kernel would write them
    del records
    made.reset_workspace_buffer(torch.empty_like(made._workspace))
    other = random_lengths(case, 1, 150)
    made.plan(**plan_arguments(other, make(other)))
    gc.collect()
    taken = [torch.full((size,), 0x7F7F7F7F, dtype=torch.int32) for _ in range(100)]
    assert ctypes.string_at(address, 4 * size) == bytes((5, 0, 0, 0)) * size
    del taken


@pytest.mark.parametrize("splits", [{}, {"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_workspace_size_is_enough(splits: dict[str, Any], graph: bool) -> None:
    """With exactly that many bytes there is as much room as in a large workspace; with fewer, fixed splits are
    refused.
    """
    case = dataclasses.replace(DECODE, kv_lens=(140, 3, 90), **splits)
    made = graph_wrapper(case, "cpu", 60, 200)[0] if graph else wrapper(case)
    arguments = plan_arguments(case, make(case))
    float_bytes, int_bytes = made.workspace_size(**arguments)
    assert (float_bytes > 0) == (splits != {"disable_split_kv": True})
    assert int_bytes > 0
    assert made._plan is None
    made.plan(**arguments)
    items, merges, _ = made._planned().launch.schedule.room.capacity
    made.reset_workspace_buffer(torch.empty(float_bytes, dtype=torch.uint8))
    made.plan(**arguments)
    if not graph:  # the room of captured launches follows from the workspace
        assert made._planned().launch.schedule.room.capacity[:2] == (items, merges)
        assert made._planned().launch.schedule.workspace() == (float_bytes, int_bytes)
    if "fixed_split_size" in splits and not graph:
        made.reset_workspace_buffer(torch.empty(float_bytes - 1, dtype=torch.uint8))
        with pytest.raises(WorkspaceError, match=f"must have {float_bytes} bytes"):
            made.plan(**arguments)


@pytest.mark.parametrize("splits", [{"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
def test_tiles_do_not_depend_on_the_batch(splits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a promise says that bits do not: another tile sums in another order."""
    asked = set()

    def rule_of(kind: Any, rows: int) -> Rule[Any]:
        asked.add((len(made), rows))
        return SMALL

    monkeypatch.setattr(fa2_family.tiles, "rule_of", rule_of)
    made: list[Any] = []
    for qo_lens in ((1,), (1, 1), (7, 300), (64, 0, 2)):
        case = paged(qo_lens, (30,) * len(qo_lens), **splits)
        wrapper(case).plan(**plan_arguments(case, make(case)))
    made.append("decode")
    for kv_lens in ((40,), (1, 90, 0)):
        case = decode(kv_lens, q_len=2, **splits)
        wrapper(case).plan(**plan_arguments(case, make(case)))
    assert len(asked) == 2
    assert (1, 2 * 2) in asked  # q_len tokens of a group of two
