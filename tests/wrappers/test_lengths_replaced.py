"""A plan that differs from the one in force in lengths only: results, launches, replays of runs, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn.emulator.settings import using
from cute_attn.errors import ArgumentError, WorkspaceError
from cute_attn.problem import BatchLengths
from cute_attn.request import batch_run
from cute_attn.request.index_arrays import IndexArrays
from tests.support.batch_case import BatchCase, call, decode, dims, heads, make, paged, plan_arguments, ragged, wrapper
from tests.support.device_plan import DECODE, PAGED, RAGGED
from tests.support.graphs import graph_wrapper
from tests.support.noted import noted
from tests.support.right import assert_planned_right, assert_right, families

on_the_emulator = pytest.mark.emulator
WIDE: dict[str, Any] = {**heads(4, 2), "head_dim_qk": 128, "head_dim_vo": 128}
FIRST, SECOND = (decode(lens, **heads(4, 1)) for lens in ((20, 9), (5, 24)))  # as many pages


@pytest.fixture
def on_fa2() -> Iterator[None]:
    with using("sm_80", kernels="fa2", sms=2, checks=False):
        yield


def new(case: BatchCase, graph: bool) -> Any:
    return graph_wrapper(case, "cpu", 20, 0, backend="emulator")[0] if graph else wrapper(case, backend="emulator")


def assert_runs(case: BatchCase, planned: Any) -> None:
    inputs = make(case)
    assert_right(case, inputs, *call(case, inputs, planned))


def assert_follows(cases: list[BatchCase], graph: bool) -> Any:
    """Plans two batches in turn on one wrapper, which it returns; the plan is that of a wrapper of its own."""
    first, second = ((case, plan_arguments(case, make(case))) for case in cases)
    planned, alone = new(cases[0], graph), new(cases[0], graph)
    planned.plan(**first[1])
    launch = planned._plan_info.launch
    planned.plan(**second[1])
    planned.plan(**first[1])
    planned.plan(**second[1])
    assert planned._plan_info.launch is launch  # lengths were replaced
    if graph:
        alone.plan(**first[1])  # fixes the launches
        alone._plan_info.launch.planned.again = lambda lengths: None
    alone.plan(**second[1])
    now, own = planned._plan_info, alone._plan_info
    assert own.launch is not launch
    assert launch.planned.schedule == own.launch.planned.schedule
    ints = launch.planned.schedule.workspace()[1] // 4
    assert torch.equal(*(batch.launch.planned.records[0][:ints] for batch in (now, own)))
    assert (now.rows, now.lengths.kv_end) == (own.rows, own.lengths.kv_end)
    return planned


@on_the_emulator
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("cases", [PAGED, RAGGED, DECODE], ids=["paged", "ragged", "decode"])
@pytest.mark.usefixtures("on_fa2")
def test_lengths_follow(cases: list[BatchCase], graph: bool) -> None:
    assert_follows(cases, graph)


@on_the_emulator
@pytest.mark.usefixtures("on_fa2")
def test_runs_of_a_captured_launch_are_replayed_with_the_new_lengths() -> None:
    planned = new(FIRST, graph=True)
    planned.plan(**plan_arguments(FIRST, make(FIRST)))
    assert_runs(FIRST, planned)
    kept = dict(planned._plan_info.cached_runs)
    planned.plan(**plan_arguments(SECOND, make(SECOND)))
    assert kept
    assert planned._plan_info.cached_runs == kept
    assert_runs(SECOND, planned)


KV_LENS = ((40, 592), (320, 310), (600, 32), (16, 624))  # of 40 pages of 16 tokens
MANY = {
    "fa2, split keys": ("fa2", [decode(lens, page_size=16, sinks=True, **heads(4, 1)) for lens in KV_LENS]),
    "fa2, whole keys": ("fa2", [paged((30, 5), lens, page_size=16, mask="causal", **heads(4, 2)) for lens in KV_LENS]),
    "fa3": ("fa3", [paged((30, 40), lens, page_size=16, mask="causal", **WIDE) for lens in KV_LENS]),
    "xqa": ("xqa", [decode(lens, page_size=16, **WIDE) for lens in KV_LENS]),
}


@on_the_emulator
@pytest.mark.parametrize("name", MANY)
def test_runs_are_replayed_under_later_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other grids and records, and page indices at other addresses and of other sizes."""
    kernels, cases = MANY[name]
    full = noted(monkeypatch, batch_run, "problem")
    with using("sm_90a", kernels=kernels, sms=16) as emulation:
        planned = new(cases[0], graph=False)
        for i, case in enumerate(cases):
            inputs = make(case)
            arguments = plan_arguments(case, inputs)
            name = next(key for key in arguments if "indices" in key)
            arguments[name] = torch.cat((arguments[name], torch.zeros(7 * i, dtype=torch.int32)))
            planned.plan(**arguments)
            for _ in range(2):
                assert_right(case, inputs, *call(case, inputs, planned))
    assert len(full) < len(cases)
    assert set(families(emulation)) - {"combine"} == {kernels}


@on_the_emulator
@pytest.mark.usefixtures("on_fa2")
def test_replays_protect_the_page_indices_of_the_plan_in_force() -> None:
    planned, out = new(FIRST, graph=False), None
    for case in (FIRST, SECOND):
        inputs = make(case)
        arguments = plan_arguments(case, inputs)
        memory = torch.zeros(64 << 10, dtype=torch.int32)
        indices = memory[: len(arguments["indices"])].copy_(arguments["indices"])
        planned.plan(**{**arguments, "indices": indices})
        out = torch.empty_like(call(case, inputs, planned)[0])
        for _ in range(2):
            call(case, inputs, planned, out=out)
        within = memory.view(out.dtype)[: out.numel()].view(out.shape)
        with pytest.raises(ArgumentError, match="out must not share memory with kv_indices"):
            call(case, inputs, planned, out=within)


@on_the_emulator
def test_tiles_follow() -> None:
    """Batches of short and of long requests have tiles of their own."""
    cases = [ragged((30, 30), (keys, 40), mask="causal", **WIDE) for keys in (100, 9000)]
    with using("sm_90a", kernels="fa3", sms=2):
        planned, tiles = new(cases[0], graph=False), []
        for case in cases:
            planned.plan(**plan_arguments(case, make(case)))
            tiles.append(planned._plan_info.launch.planned.schedule.tiling.tile)
        assert tiles[0] != tiles[1]
        assert_follows(cases, graph=False)


@on_the_emulator
@pytest.mark.usefixtures("on_fa2")
def test_other_shapes_are_checked_again() -> None:
    """Runs that passed under lengths before are refused where they do not fit those now."""
    short, long = (paged((rows,), (20,), **heads(2, 1)) for rows in (3, 7))
    planned = wrapper(short, backend="emulator")
    planned.plan(**plan_arguments(short, make(short)))
    assert_runs(short, planned)
    planned.plan(**plan_arguments(long, make(long)))
    with pytest.raises(ValueError, match="q must have the planned 7 rows"):
        call(short, make(short), planned)


@on_the_emulator
@pytest.mark.usefixtures("on_fa2")
def test_after_an_error_the_lengths_before_stay() -> None:
    case = dataclasses.replace(decode((40, 30), **heads(2, 1)), fixed_split_size=16)
    planned = wrapper(case, backend="emulator")
    planned.plan(**plan_arguments(case, make(case)))
    needed = planned.workspace_size(**plan_arguments(case, make(case)))[0]
    planned.reset_workspace_buffer(torch.empty(needed, dtype=torch.uint8))
    planned.plan(**plan_arguments(case, make(case)))
    more = dataclasses.replace(case, kv_lens=(300, 200))
    with pytest.raises(WorkspaceError):
        planned.plan(**plan_arguments(more, make(more)))
    assert_runs(case, planned)


@pytest.mark.parametrize(("batch_size", "q_len"), [(3, 2), (1, 1), (0, 4)])
def test_lengths_of_uniform_queries(batch_size: int, q_len: int) -> None:
    """Are those that are computed where nothing says that all are equal."""
    kv_indptr = torch.arange(batch_size + 1)
    told = IndexArrays(("", "kv_indptr"), None, kv_indptr, q_len=q_len).on_host()
    assert told.qo_indptr.tolist() == [i * q_len for i in range(batch_size + 1)]
    computed = BatchLengths(told.qo_indptr, told.kv_indptr, told.kv_len)
    for name in ("longest_qo", "with_queries"):
        assert getattr(told, name) == getattr(computed, name)


# ---- long and short requests in turn

LONG, SHORT = (decode(lengths, dtype="bfloat16", **heads(16, 4), **dims(128)) for lengths in ((161, 70), (9, 40)))


@on_the_emulator
def test_long_and_short_requests_take_xqa() -> None:
    """But not the same kernel: clusters share those of more than 144 keys."""
    with using("sm_90a") as emulation:
        planned = wrapper(LONG, backend="emulator")
        for case in (LONG, SHORT, LONG):
            assert_planned_right(case, planned)
            assert planned._planned().launch.on[1] == "xqa"
    assert [record.spec["work"] for record in emulation.records] == ["cluster", "whole", "cluster"]


def test_captured_launches_take_one_backend_for_all_lengths() -> None:
    with using("sm_90a"):
        planned, _ = graph_wrapper(LONG, "cpu", 200, 0, backend="emulator")
        for case in (LONG, SHORT, LONG):
            planned.plan(**plan_arguments(case, make(case)))
            assert planned._planned().launch.on[1] == "xqa"
