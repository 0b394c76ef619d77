"""The wrappers over fa2's host side: what they hand over, judged by the interpreter of the kernels' contract."""

from __future__ import annotations

import dataclasses
import gc
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import WorkspaceError
from cute_attn.dispatch import capabilities, select
from cute_attn.kernels.fa2.host import batch as fa2_batch
from cute_attn.kernels.fa2.host.family import FAMILY
from cute_attn.kernels.fa2.spec import Fa2Spec, Tile
from cute_attn.kernels.host import gpu as gpus
from cute_attn.kernels.host.batch import SplitKvBatchRun
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.problem import GraphLimits
from cute_attn.runtime.arch import named
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.records import ITEM_INTS
from tests.support.backend_problems import Built, build
from tests.support.batch_case import (
    SMALL,
    BatchCase,
    call,
    decode,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    random_batch_case,
    random_lengths,
    wrapper,
)
from tests.support.fa2_contract import CombineParams, Fa2Params, InterpretedLaunch, interpret
from tests.support.graphs import Captured, Pair, graph_wrapper
from tests.support.matrix import poisoned_memory
from tests.support.right import assert_right

GPU = Gpu(named("sm_90a"), 0, 66)
TILE = Tile(16, 16, 1, 1, 2)  # small: small batches then have many
DECODE = decode((40, 3, 0), page_size=4, **heads(4, 2))


@pytest.fixture(autouse=True)
def on_fa2(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(
        fa2_batch, "tiles", types.SimpleNamespace(choose=lambda *args: TILE, resident_ctas=lambda *args: 2)
    )
    monkeypatch.setattr(gpus, "of_device", lambda index: GPU)
    monkeypatch.setattr(select, "chosen", lambda features, name, *load: capabilities.BY_NAME["fa2"])
    monkeypatch.setattr(select, "reasons_against", lambda *args: [])


def planned(built: Built, staging: Staging | None = None) -> SplitKvBatchRun:
    staging = staging or Staging(torch.device("cpu"))
    run = FAMILY.plan(built.problem.settings, built.lengths, built.limits, staging, GPU)
    staging.send()
    return run


def solve(case: BatchCase) -> Built:
    """With the host side alone."""
    built = build(case)
    planned(built)(built.problem)
    assert built.wrong() == ""
    return built


def assert_solved(case: BatchCase, made: Any = None) -> None:
    inputs = make(case)
    if made is not None:
        made.plan(**plan_arguments(case, inputs))
    with poisoned_memory():
        out, lse = call(case, inputs, made)
    assert_right(case, inputs, out, lse)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_small(case: BatchCase) -> None:
    assert_solved(case)


LENGTHS = (5, 0, 37, 1), (300, 20, 64, 0)
SOURCES = {
    "ragged": ragged(*LENGTHS, **heads(6, 2)),
    "ragged HND": ragged(*LENGTHS, kv_layout="HND", **heads(6, 2)),
    "page 1": paged(*LENGTHS, page_size=1, **heads(6, 2)),
    "page 5": paged(*LENGTHS, page_size=5, kv_layout="HND", **heads(6, 2)),
    "page 16": paged(*LENGTHS, **heads(6, 2)),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": "causal"},
    "window": {"window_left": 20, "mask": "causal"},
    "window, open to the right": {"window_left": 150},
    "mask": {"mask": "custom"},
    "mask, window": {"mask": "custom", "window_left": 30},
    "soft cap": {"logits_soft_cap": 3.0},
    "alibi": {"pos_encoding_mode": "ALIBI", "mask": "causal"},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA"},
    "sinks": {"sinks": True},
    "natural lse": {"lse_base": "ln"},
    "no lse": {"return_lse": False},
    "out fp32": {"o_dtype": "float32"},
    "negative scale": {"sm_scale": -0.1},
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, source: str) -> None:
    assert_solved(dataclasses.replace(SOURCES[source], **FEATURES[feature]))


@pytest.mark.parametrize("seed", range(60))
def test_random(seed: int) -> None:
    assert_solved(random_batch_case(seed, max_len=150, max_batch=4))


# ---- launches


LONG = ragged((1, 1, 1), (40, 0, 900), **heads(6, 2))  # whose last request is cut


def test_keys_are_cut_and_merged() -> None:
    solve(dataclasses.replace(LONG, v_scale=2.0, sinks=True, lse_base="ln"))
    main, combine = InterpretedLaunch.fired
    assert main.stream == combine.stream == 77
    assert isinstance(main.params, Fa2Params)
    assert isinstance(combine.params, CombineParams)
    assert combine.params.rows_per_merge == 3  # the rows of one token
    assert combine.params.slot_rows == TILE.rows
    assert combine.params.merges - main.params.items == 4 * ITEM_INTS * (main.grid[0] // LONG.num_kv_heads)
    assert isinstance(main.spec, Fa2Spec)
    assert main.spec.out_dtype == "float16"  # items that see all keys write the output themselves


def test_launches_without_a_gpu() -> None:
    built = solve(LONG)
    _, named_launches = FAMILY.batch_launches(built.problem.settings, built.lengths, built.limits, GPU.arch, GPU.sms)
    assert named_launches == [(launch.spec, launch.grid) for launch in InterpretedLaunch.fired]


def test_no_cut_no_merge() -> None:
    solve(dataclasses.replace(LONG, disable_split_kv=True))
    assert len(InterpretedLaunch.fired) == 1


def test_no_query_tokens_launch_nothing() -> None:
    solve(ragged((0, 0), (5, 0)))
    assert InterpretedLaunch.fired == []


def test_rows_of_other_requests_stay_as_they_are() -> None:
    """More rows of q and out than the plan knows: the kernel must leave them alone."""
    built = build(ragged((2, 3), (30, 40)))
    fewer = built.lengths.replace(qo_indptr=np.array([1, 2, 4]))
    planned(dataclasses.replace(built, lengths=fewer))(built.problem)
    assert built.problem.out[[0, 4]].isnan().all()
    assert built.problem.out[1:4].isfinite().all()


def test_settings_of_a_run() -> None:
    """k_scale and v_scale come with the run; a scale that is not positive takes another kernel."""
    built = build(LONG)
    run, settings = planned(built), built.problem.settings
    for change in ({"sm_scale": 0.3}, {"v_scale": 2.0}, {}):
        run(built.problem._replace(settings=settings._replace(**change)))
        assert built.wrong(dataclasses.replace(LONG, **change)) == ""
    assert len({id(launch.artifact) for launch in InterpretedLaunch.fired}) == 2  # no kernel is loaded a second time
    features = settings.features._replace(positive_scale=False)
    run(built.problem._replace(settings=settings._replace(features=features, sm_scale=-0.2)))
    assert built.wrong(dataclasses.replace(LONG, sm_scale=-0.2)) == ""


@pytest.mark.parametrize("source", SOURCES)
def test_scales_on_the_device(source: str) -> None:
    """As a GPU's are: the kernels read them."""
    built = build(SOURCES[source])
    settings, scales = built.problem.settings, (torch.tensor([-0.5]), torch.tensor(3.0))
    features = settings.features._replace(positive_scale=False)
    problem = built.problem._replace(
        settings=settings._replace(features=features, v_scale=-2.0),
        scale_tensors=scales,
        v_scale_tensor=torch.tensor([0.25]),
    )
    planned(built)(problem)
    assert built.wrong(dataclasses.replace(built.case, q_scale=-0.5, k_scale=3.0, v_scale=-0.5)) == ""


# ---- CUDA graphs: launches fired again as they were


def capture(run: Callable[[], Pair]) -> tuple[Pair, Callable[[], None]]:
    held: list[tuple[InterpretedLaunch, Any]] = []
    fire = InterpretedLaunch.fire

    def recording(launch: InterpretedLaunch, *arguments: Any) -> None:
        held.append((launch, arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedLaunch, "fire", recording)
        results = run()

    def replay() -> None:
        for launch, arguments in held:
            fire(launch, *arguments)

    return results, replay


GRAPHED = (
    paged((37, 2, 5, 16), (300,) * 4, page_size=4, mask="causal", **heads(4, 2)),
    paged((9,) * 3, (130,) * 3, page_size=5, fixed_split_size=8, kv_layout="HND"),
    paged((7, 20), (90,) * 2, disable_split_kv=True, sinks=True),
    paged((13, 5, 9), (70,) * 3, mask="custom", window_left=30),
    ragged((30, 20, 5), (150,) * 3, mask="causal"),
    ragged((30, 20), (90,) * 2, kv_layout="HND", mask="packed"),
    decode((400,) * 4, **heads(8, 2)),
    decode((200,) * 3, q_len=3, page_size=1, **heads(4, 1)),
    decode((300,) * 2, fixed_split_size=3, kv_dtype="float8_e4m3fn"),
)


@pytest.mark.parametrize("case", GRAPHED, ids=lambda case: case.id)
def test_replays_with_other_lengths(case: BatchCase) -> None:
    captured = Captured(case, "cpu", capture)
    captured.replay(case)
    for seed in range(5):
        captured.replay(random_lengths(case, seed, max(case.kv_lens)))


def test_graph_launches_keep_their_form() -> None:
    """A second plan of other lengths: same grids, parameters and record addresses."""
    built, staging = build(ragged((1,) * 4, (900, 5, 0, 64), **heads(6, 2))), Staging(torch.device("cpu"))
    limits = built.limits._replace(graph=GraphLimits(7, 9, 1900), keeps_address=True)
    run = planned(dataclasses.replace(built, limits=limits), staging)
    run(built.problem)
    assert built.wrong() == ""
    grids = [launch.grid for launch in InterpretedLaunch.fired]
    other = build(ragged((1, 0, 1), (64, 3, 700), **heads(6, 2)))
    again = planned(dataclasses.replace(other, limits=limits), staging)
    assert [again.schedule.grid, again.schedule.combine.grid] == grids
    assert again.items == run.items
    same = dataclasses.replace(again.schedule, work=run.schedule.work)
    assert same == run.schedule


def test_replays_after_another_workspace() -> None:
    """A graph captured before sees no later plan, but the records that it reads are still there."""
    case = ragged((30, 20, 5), (150,) * 3, mask="causal")
    captured = Captured(case, "cpu", capture)
    captured.replay(case)
    expected = captured.out.clone()
    held, records = captured.wrapper._workspace, captured.wrapper._planned().launch.records
    size = records.numel()
    del records
    captured.wrapper.reset_workspace_buffer(torch.empty_like(held))
    other = random_lengths(case, 1, 150)
    captured.wrapper.plan(**plan_arguments(other, make(other)))
    gc.collect()
    taken = [torch.full((size,), 0x7F7F7F7F, dtype=torch.int32) for _ in range(100)]
    captured.out.zero_()
    captured.again()
    assert torch.equal(captured.out, expected)
    del taken


@pytest.mark.parametrize("splits", [{}, {"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_workspace_size_is_enough(splits: dict[str, Any], graph: bool) -> None:
    """With exactly that many bytes the schedule is that of a large workspace; with fewer, fixed splits are refused."""
    case = dataclasses.replace(DECODE, kv_lens=(140, 3, 90), **splits)
    made = graph_wrapper(case, "cpu", 60, 200)[0] if graph else wrapper(case)
    arguments = plan_arguments(case, make(case))
    float_bytes, int_bytes = made.workspace_size(**arguments)
    assert (float_bytes > 0) == (splits != {"disable_split_kv": True})
    assert int_bytes > 0
    assert made._plan is None
    made.plan(**arguments)
    launch = made._planned().launch
    records = launch.records[: int_bytes // 4].clone()
    if not graph:  # the room of captured launches follows from the workspace
        assert launch.schedule.work.ints.nbytes == int_bytes
    made.reset_workspace_buffer(torch.empty(float_bytes, dtype=torch.uint8))
    made.plan(**arguments)
    if not graph:
        assert torch.equal(made._planned().launch.records[: len(records)], records)
    assert_solved(case, made)
    if "fixed_split_size" in splits and not graph:
        made.reset_workspace_buffer(torch.empty(float_bytes - 1, dtype=torch.uint8))
        with pytest.raises(WorkspaceError, match=f"must have {float_bytes} bytes"):
            made.plan(**arguments)


@pytest.mark.parametrize("splits", [{"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
def test_tiles_do_not_depend_on_the_batch(splits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a promise says that bits do not: another tile sums in another order."""
    asked = set()

    def choose(kind: Any, rows: int, arch: Any) -> Tile:
        asked.add((len(made), rows))
        return TILE

    monkeypatch.setattr(fa2_batch.tiles, "choose", choose)
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
