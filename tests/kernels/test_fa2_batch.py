"""The wrappers over fa2's host side: the launches that they make. Numbers of the kernels: `tests/emulator`."""

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
from cute_attn.kernels.fa2.host import variant as fa2_variant
from cute_attn.kernels.fa2.host.family import FAMILY
from cute_attn.kernels.fa2.spec import Fa2Spec, Tile
from cute_attn.kernels.host import gpu as gpus
from cute_attn.kernels.host.batch import SplitKvBatchRun
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.params import LOG2E
from cute_attn.problem import GraphLimits
from cute_attn.runtime.arch import named
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.records import ITEM_INTS
from tests.support.backend_problems import Built, build
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
from tests.support.named_launches import STREAM, NamedLaunch, recorded

GPU = Gpu(named("sm_90a"), 0, 66)
TILE = Tile(16, 16, 1, 1, 2)  # small: small batches then have many
DECODE = decode((40, 3, 0), page_size=4, **heads(4, 2))
LONG = ragged((1, 1, 1), (40, 0, 900), **heads(6, 2))  # whose last request is cut


@pytest.fixture(autouse=True)
def on_fa2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fa2_variant.tiles, "choose", lambda *args: TILE)
    monkeypatch.setattr(fa2_variant.tiles, "resident_ctas", lambda *args: 2)
    monkeypatch.setattr(gpus, "of_device", lambda index: GPU)
    monkeypatch.setattr(select, "chosen", lambda features, name, *load: capabilities.BY_NAME["fa2"])
    monkeypatch.setattr(select, "reasons_against", lambda *args: [])
    with recorded():
        yield


def planned(built: Built, staging: Staging | None = None) -> SplitKvBatchRun:
    staging = staging or Staging(torch.device("cpu"))
    run = FAMILY.plan(built.problem.settings, built.lengths, built.limits, staging, GPU)
    staging.send()
    return run


def launched(case: BatchCase) -> Built:
    built = build(case)
    planned(built)(built.problem)
    return built


def test_keys_are_cut_and_merged() -> None:
    built = launched(dataclasses.replace(LONG, v_scale=2.0, sinks=True, lse_base="ln"))
    main, combine = NamedLaunch.fired
    assert main.stream == combine.stream == STREAM
    assert combine.params.rows_per_merge == 3  # the rows of one token
    assert combine.params.slot_rows == TILE.rows
    rows = built.limits.workspace_bytes // (LONG.num_kv_heads * TILE.rows * 4 * 65) * LONG.num_kv_heads * TILE.rows
    assert combine.params.lse_partial - combine.params.o_partial == rows * 4 * 64  # behind the outputs of all partials
    assert (main.params.o_partial, main.params.lse_partial) == (combine.params.o_partial, combine.params.lse_partial)
    assert combine.params.merges - main.params.items == 4 * ITEM_INTS * (main.grid[0] // LONG.num_kv_heads)
    assert isinstance(main.spec, Fa2Spec)
    assert main.spec.out_dtype == "float16"  # items that see all keys write the output themselves


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


def test_settings_of_a_run() -> None:
    """Scales come with the run; a scale that is not positive takes another kernel."""
    built = build(LONG)
    run, settings = planned(built), built.problem.settings
    for change in ({"sm_scale": 0.3}, {"v_scale": 2.0}, {}):
        run(built.problem._replace(settings=settings._replace(**change)))
    assert [launch.params.scale for launch in NamedLaunch.fired[::2]] == [0.3 * LOG2E, *[64**-0.5 * LOG2E] * 2]
    assert [launch.params.v_scale for launch in NamedLaunch.fired[1::2]] == [1.0, 2.0, 1.0]
    assert len({id(launch.artifact) for launch in NamedLaunch.fired}) == 2  # no kernel is loaded a second time
    features = settings.features._replace(positive_scale=False)
    run(built.problem._replace(settings=settings._replace(features=features, sm_scale=-0.2)))
    assert len({id(launch.artifact) for launch in NamedLaunch.fired}) == 3


def test_scales_on_the_device() -> None:
    """As a GPU's are: the kernels get their addresses."""
    built = build(LONG)
    settings, scales, v_scale = built.problem.settings, (torch.tensor([-0.5]), torch.tensor(3.0)), torch.tensor([0.25])
    settings = settings._replace(features=settings.features._replace(positive_scale=False))
    planned(built)(built.problem._replace(settings=settings, scale_tensors=scales, v_scale_tensor=v_scale))
    main, combine = (launch.params for launch in NamedLaunch.fired)
    assert (main.scale0, main.scale1) == tuple(x.data_ptr() for x in scales)
    assert main.v_scale_ptr == combine.v_scale_ptr == v_scale.data_ptr()  # of whole segments, and of merged ones


def test_graph_launches_keep_their_form() -> None:
    """A second plan of other lengths: same grids, parameters and record addresses."""
    built, staging = build(ragged((1,) * 4, (900, 5, 0, 64), **heads(6, 2))), Staging(torch.device("cpu"))
    limits = built.limits._replace(graph=GraphLimits(7, 9, 1900), keeps_address=True)
    run = planned(dataclasses.replace(built, limits=limits), staging)
    run(built.problem)
    grids = [launch.grid for launch in NamedLaunch.fired]
    other = build(ragged((1, 0, 1), (64, 3, 700), **heads(6, 2)))
    again = planned(dataclasses.replace(other, limits=limits), staging)
    assert [again.schedule.grid, again.schedule.combine.grid] == grids
    assert again.items == run.items
    same = dataclasses.replace(again.schedule, work=run.schedule.work)
    assert same == run.schedule


def test_captured_launches_keep_their_records() -> None:
    """A graph captured before another workspace sees no later plan, but the records that it reads are still there."""
    case = ragged((30, 20, 5), (150,) * 3, mask="causal")
    inputs, (made, _) = make(case), graph_wrapper(case, "cpu", 30, 200)
    made.plan(**plan_arguments(case, inputs))
    call(case, inputs, made)
    address, size = NamedLaunch.fired[0].params.items, made._planned().launch.records.numel()
    records = ctypes.string_at(address, 4 * size)
    made.reset_workspace_buffer(torch.empty_like(made._workspace))
    other = random_lengths(case, 1, 150)
    made.plan(**plan_arguments(other, make(other)))
    gc.collect()
    taken = [torch.full((size,), 0x7F7F7F7F, dtype=torch.int32) for _ in range(100)]
    assert ctypes.string_at(address, 4 * size) == records
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

    monkeypatch.setattr(fa2_variant.tiles, "choose", choose)
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
