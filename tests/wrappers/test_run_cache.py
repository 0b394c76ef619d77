"""Runs of one plan reuse what an earlier one checked, and never anything that differs in this run, or has moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError
from cute_attn.emulator.settings import using
from cute_attn.kernels.host import gpu as gpus
from cute_attn.kernels.host.prepared import prepared
from cute_attn.request import batch_run
from tests.support.batch_case import BatchCase, call, decode, heads, make, paged, plan_arguments
from tests.support.formula import assert_batch_right
from tests.support.launch_corpus import RecordingDriver
from tests.support.noted import noted
from tests.support.right import assert_right, planned
from tests.wrappers.kinds import KINDS

PAGED = paged((5, 17), (40, 33), page_size=4, mask="causal", **heads(4, 2))


@pytest.fixture
def emulated() -> Iterator[None]:
    with using("sm_90a", kernels="fa2", sms=4):
        yield


@pytest.fixture
def full_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs that were checked in full."""
    return noted(monkeypatch, batch_run, "problem")


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated")
def test_sinks_are_checked_in_every_run(full_checks: list[Any]) -> None:
    case = dataclasses.replace(PAGED, sinks=True)
    made, inputs = planned(case, backend="emulator")
    sinks = torch.linspace(-1, 2, case.num_qo_heads)
    for _ in range(2):
        call(case, dataclasses.replace(inputs, sinks=sinks), made)
    assert len(full_checks) == 1
    with pytest.raises(ArgumentError, match="sinks must be finite"):
        call(case, dataclasses.replace(inputs, sinks=torch.full_like(sinks, torch.inf)), made)
    halves = dataclasses.replace(inputs, sinks=sinks.half())
    for _ in range(2):  # are copied
        assert_right(case, halves, *call(case, halves, made))
    assert len(full_checks) == 4


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated")
def test_a_query_with_other_strides(full_checks: list[Any]) -> None:
    """out is dense whatever q is."""
    made, inputs = planned(PAGED, backend="emulator")
    inputs = dataclasses.replace(inputs, q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1))
    for _ in range(2):
        out, lse = call(PAGED, inputs, made)
        assert out.is_contiguous()
        assert_right(PAGED, inputs, out, lse)
    assert len(full_checks) == 1


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("backend", "base"),
    [*(("auto", case) for case in KINDS), pytest.param("emulator", PAGED, marks=pytest.mark.emulator)],
)
def test_options_of_each_run(backend: str, base: BatchCase) -> None:
    """Those that differ, in whatever order they come, and those that are equal but not the same."""
    made, inputs = planned(base, backend=backend)
    right = assert_right if backend == "emulator" else assert_batch_right
    changes: list[dict[str, Any]] = [
        {},
        {"k_scale": 2.0},
        {"v_scale": -3.0},
        {"q_scale": 0.5, "k_scale": 0.5},
        {"k_scale": 2},
        {"k_scale": 2.0, "tensor_scales": True},
        {"sinks": True},
        {"return_lse": False},
        {},
    ]
    for change in [*changes, *changes[::-1]]:
        case = dataclasses.replace(base, **change)
        sinks = torch.linspace(-1, 2, case.num_qo_heads) if case.sinks else None
        now = dataclasses.replace(inputs, sinks=sinks)
        right(case, now, *call(case, now, made))


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated")
def test_a_plan_without_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous plan stays in force, with its records."""
    made, inputs = planned(PAGED, backend="emulator")
    other = dataclasses.replace(PAGED, kv_lens=(21, 33), mask="none")
    arguments = plan_arguments(other, make(other))

    def missing(*arguments: Any) -> None:
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(gpus, "load", missing)
        prepared.cache_clear()  # of earlier tests
        with pytest.raises(RuntimeError, match="no kernel"):
            made.plan(**arguments)
    assert_right(PAGED, inputs, *call(PAGED, inputs, made))


@pytest.mark.parametrize("backend", ["xqa", "fa2"])
def test_launches_get_the_addresses_of_now(backend: str, driver: RecordingDriver) -> None:
    """Runs read page numbers and write partial results where a caller's tensor is now: it may move in place."""
    case = decode((51, 53), **heads(4, 1))
    made, inputs = planned(case, backend=backend)
    workspace, arguments = made._float_workspace_buffer, plan_arguments(case, inputs)
    for moved in (None, arguments["indices"], workspace):
        for _ in range(3):
            made.plan(**arguments)
            call(case, inputs, made)
        if moved is not None:
            moved.resize_(4 * moved.numel())
            call(case, inputs, made)
        values = driver.recorded[-1].values
        read = {"kv_indices": arguments["indices"]}
        if backend == "xqa":
            read = {"table": arguments["indices"], "partials": made._workspace}
        for field, tensor in read.items():
            assert int.from_bytes(values[field], "little") == tensor.data_ptr()
