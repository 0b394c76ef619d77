"""Plans whose lengths stay on the device, on the emulator: results, what is read, graphs, and what plans refuse."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from cute_attn.emulator.settings import using
from cute_attn.errors import ArgumentTypeError, RuntimeArgumentError
from cute_attn.problem import DeviceLengths
from cute_attn.wrappers import plan, plan_request
from tests.support.batch_case import BatchCase, call, make, plan_arguments, wrapper
from tests.support.device_plan import DECODE, PAGED, RAGGED, emulated_device, moved
from tests.support.graphs import graph_wrapper
from tests.support.right import assert_right
from tests.support.xqa_rules import NO_CLUSTERS, move_steps

emulated = pytest.mark.emulator

KINDS = [PAGED, RAGGED, DECODE]
IDS = ["paged", "ragged", "decode"]
TARGETS = [(*target, False) for target in itertools.product([("sm_80", "fa2")], KINDS)]
TARGETS += [(*target, False) for target in itertools.product([("sm_90a", "fa3")], KINDS[:2])]
TARGETS += [(("sm_90a", "xqa"), DECODE, graph) for graph in (False, True)]


def compare(case: BatchCase, inputs: Any, planned: Any) -> None:
    assert_right(case, inputs, *call(case, inputs, planned))


@emulated
@pytest.mark.parametrize(("target", "cases", "graph"), TARGETS)
def test_results_without_lengths_on_the_host(
    cases: list[BatchCase], target: tuple[str, str], graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, kernels = target
    if not graph:  # XQA has shares of single CTAs here, and of clusters in graphs
        move_steps(monkeypatch, keys={145: 1, 513: 1, 1025: 1}, **NO_CLUSTERS)
    with using(arch, kernels=kernels, sms=2, checks=False), emulated_device():
        if graph:
            planned, buffers = graph_wrapper(cases[0], "cpu", 20, 0, backend="emulator")
        else:
            planned, buffers = wrapper(cases[0], backend="emulator"), {}
        for case in cases:
            inputs = make(case)
            arguments = moved(case, inputs, "cpu")
            for name, x in arguments.items():
                if name.endswith("last_page_len"):
                    x[x == 0] = 7  # of no page
            planned.plan(**arguments)
            if case.kind != "decode":  # the first run schedules: the caller may overwrite its arrays before
                for name in ("qo_indptr", "kv_indptr", "paged_kv_indptr", "paged_kv_last_page_len"):
                    if name in arguments:
                        arguments[name].fill_(-1)
            compare(case, inputs, planned)
            assert isinstance(planned._plan_info.lengths, DeviceLengths)
            for name in ("indptr", "last_page_len"):
                assert not graph or torch.equal(buffers[f"paged_kv_{name}_buffer"].long(), arguments[name].long())


@emulated
@pytest.mark.parametrize("cases", KINDS, ids=IDS)
def test_a_graph_wrapper_keeps_its_records_in_place(cases: list[BatchCase]) -> None:
    """Plans of lengths on the device and on the host follow one another, as captured launches read them. Those of equal
    lengths are equal.
    """
    first, second = (dataclasses.replace(case, indices="int64") for case in cases)
    with using("sm_80", kernels="fa2", sms=2, checks=False):
        planned, buffers = graph_wrapper(first, "cpu", 20, 0, backend="emulator")
        places, schedules = set(), []
        for i, case in enumerate([first, second, first, second]):
            inputs = make(case)
            if i == 2:
                planned.plan(**plan_arguments(case, inputs))
                compare(case, inputs, planned)
            else:
                with emulated_device():
                    planned.plan(**moved(case, inputs, "cpu"))
                    compare(case, inputs, planned)
            records, _ = planned._plan_info.launch.planned.records
            places.add(records.data_ptr())
            schedules.append(records.clone())
            for name, buffer in buffers.items():
                if "indptr" in name:
                    expected = inputs.qo_indptr if name.startswith("qo") else inputs.kv_indptr
                    assert torch.equal(buffer.long(), expected.long())
        assert len(places) == 1
        assert torch.equal(schedules[0], schedules[2])
        assert not torch.equal(schedules[1], schedules[2])


@emulated
def test_forward_schedules_what_it_replaces() -> None:
    case = PAGED[0]
    inputs, other = make(case), dataclasses.replace(case, window_left=20)
    with using("sm_80", kernels="fa2", sms=2, checks=False), emulated_device():
        planned = wrapper(case, backend="emulator")
        planned.plan(**moved(case, inputs, "cpu"))
        for now in (other, case):
            out, lse = planned.forward(inputs.q, *inputs.kv, causal=True, window_left=now.window_left, return_lse=True)
            assert_right(now, inputs, out, lse)


@emulated
def test_lengths_are_read_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = PAGED[0], make(PAGED[0])
    with using("sm_80", kernels="fa2", sms=2, checks=False), emulated_device():
        planned = wrapper(case, backend="emulator")
        planned.plan(**moved(case, inputs, "cpu"))
        with pytest.raises(AssertionError, match="read on the host"):
            _ = planned._max_kv_len
        compare(case, inputs, planned)
        monkeypatch.setenv("CUTE_ATTN_VALIDATE", "1")
        wrong = moved(case, inputs, "cpu")
        wrong["paged_kv_indptr"] = wrong["paged_kv_indptr"].flip(0)
        with pytest.raises(RuntimeError, match="paged_kv_indptr must not decrease"):
            planned.plan(**wrong)


@emulated
def test_lengths_are_read_from_arrays_that_nobody_wrote() -> None:
    case, inputs = DECODE[0], make(DECODE[0])
    with using("sm_90a", kernels="xqa", sms=2):
        planned = wrapper(case, backend="emulator")
        with emulated_device():
            arguments = moved(case, inputs, "cpu")
            planned.plan(**arguments)
            compare(case, inputs, planned)
        assert planned._max_kv_len == max(case.kv_lens)
        with emulated_device():
            planned.plan(**arguments)
        arguments["last_page_len"] += 0
        with pytest.raises(RuntimeArgumentError, match="must not be written after plan"):
            _ = planned._max_kv_len
        with pytest.raises(ArgumentTypeError, match="sm_scale"):
            planned.plan(**arguments | {"sm_scale": True})


@emulated
def test_a_request_gets_no_pages_that_are_not_there() -> None:
    """Numbers that only `CUTE_ATTN_VALIDATE=1` would refuse lead to no access outside the page numbers."""
    made = wrapper(DECODE[0], backend="emulator")
    cache = torch.ones(3, 2, 16, 2, 64).half()
    indptr = torch.tensor([0, 2, 9, 5, 1 << 40], dtype=torch.int64)
    with using("sm_90a", kernels="xqa", sms=2), emulated_device():
        made.plan(indptr, torch.arange(3).int(), torch.tensor([99, 1, 1, 1]), 4, 2, 64, 16)
        out = made.run(torch.ones(4, 4, 64).half(), cache)
    assert out[0].eq(1).all()
    assert out[1:].eq(0).all()


def test_the_reference_reads_lengths_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_request, "_is_on", lambda device, x: True)
    case, inputs = DECODE[0], make(DECODE[0])
    planned, arguments = wrapper(case), moved(case, inputs, "cpu")
    planned.plan(**arguments)
    arguments["indptr"].zero_()  # the plan has read it
    compare(case, inputs, planned)


@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        (PAGED[0], {"qo_indptr": torch.zeros(3, dtype=torch.int32)}, "as many elements as qo_indptr = .3,., got 5"),
        (PAGED[0], {"paged_kv_indptr": torch.zeros(5)}, "paged_kv_indptr must have dtype"),
        (
            PAGED[0],
            {"paged_kv_last_page_len": torch.zeros(3, dtype=torch.int32)},
            "must have shape .batch_size. = .4,., got 3",
        ),
        (PAGED[0], {"paged_kv_indices": torch.zeros(3, 3, dtype=torch.int32)}, "indices must have shape"),
        (PAGED[0], {"num_kv_heads": 3}, "num_qo_heads"),
        (DECODE[0], {"last_page_len": torch.ones(3).int()}, "last_page_len must have shape .batch_size. = .4,., got 3"),
        (DECODE[0], {"indptr": torch.zeros(5)}, "indptr must have dtype"),
    ],
)
def test_what_needs_no_lengths_is_checked(case: BatchCase, changed: dict[str, Any], message: str) -> None:
    with using("sm_90a", kernels="xqa" if case.kind == "decode" else "fa2"), emulated_device():
        planned = wrapper(case, backend="emulator")
        with pytest.raises((ValueError, TypeError), match=message):
            planned.plan(**{**moved(case, make(case), "cpu"), **changed})


@emulated
@pytest.mark.parametrize("cases", KINDS, ids=IDS)
def test_a_captured_first_run_reads_the_index_buffers(cases: list[BatchCase], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of its planner launch follow later plans, whose lengths these hold."""
    case, other = cases[:2]
    inputs, later = make(case), make(other)
    with using("sm_80", kernels="fa2", sms=2, checks=False), emulated_device():
        planned, buffers = graph_wrapper(case, "cpu", 20, 0, backend="emulator")
        planned.plan(**moved(case, inputs, "cpu"))
        with monkeypatch.context() as patch:
            patch.setattr(plan, "is_capturing", lambda device: True)
            if case.kind != "decode":
                compare(case, inputs, planned)
                captured = planned._plan
            else:
                captured = planned._plan.with_options(num_qo_heads=case.num_qo_heads // 2)
                captured.schedule_for_run()
        run = captured.batch.launch.planned
        places = {x.data_ptr() for x in run.lengths.arrays().values()}
        assert places == {x.data_ptr() for name, x in buffers.items() if "indices" not in name}
        assert captured.staging._sent.layout is None  # nothing is written before a replay
        planned.plan(**moved(other, later, "cpu"))
        compare(other, later, planned)


@emulated
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("with_lse_base", [False, True], ids=["run", "lse_base"])
@pytest.mark.parametrize("cases", [PAGED, RAGGED], ids=["paged", "ragged"])
def test_a_first_run_that_fails_settles_nothing(cases: list[BatchCase], with_lse_base: bool, graph: bool) -> None:
    case, inputs = cases[0], make(cases[0])
    options = {"lse_base": "ln", "return_lse": True} if with_lse_base else {}
    with using("sm_80", kernels="fa2", sms=2, checks=False), emulated_device():
        planned = (
            graph_wrapper(case, "cpu", 20, 0, backend="emulator")[0] if graph else wrapper(case, backend="emulator")
        )
        planned.plan(**moved(case, inputs, "cpu"))
        for wrong in (inputs.q.transpose(0, 1), inputs.q[:3, :3]):
            with pytest.raises(ValueError, match=r"\bq\b"):
                planned.run(wrong, *inputs.kv, **options)
            assert planned._plan.is_open
        compare(case, inputs, planned)
        later = make(cases[1])
        planned.plan(**moved(cases[1], later, "cpu"))
        compare(cases[1], later, planned)
