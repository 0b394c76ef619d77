"""Runs of one plan reuse what an earlier one checked, and never anything that differs in this run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError
from cute_attn.emulator.settings import using
from cute_attn.kernels.fa2.host import prepared as fa2_prepared
from cute_attn.kernels.host.prepared import prepared
from cute_attn.request import batch_run, operands
from tests.support.batch_case import BatchCase, BatchInputs, call, heads, make, paged, plan_arguments
from tests.support.case import shifted
from tests.support.formula import assert_batch_right
from tests.support.launch_corpus import driver
from tests.support.noted import noted
from tests.support.right import assert_right, planned
from tests.wrappers.kinds import KINDS

__all__ = ["driver"]  # a fixture

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
    lse = torch.empty(inputs.q.shape[:2])
    now = dataclasses.replace(inputs, sinks=sinks)
    for _ in range(2):
        call(case, now, made, lse=lse)
    with pytest.raises(ArgumentError, match="lse must not share memory with sinks"):
        call(case, dataclasses.replace(inputs, sinks=lse[0]), made, lse=lse)


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
def test_a_new_plan_has_no_cached_runs(full_checks: list[Any]) -> None:
    made, inputs = planned(PAGED, backend="emulator")
    for change in ({}, {"window_left": 3}, {"mask": "none"}, {}):
        case = dataclasses.replace(PAGED, **change)
        made.plan(**plan_arguments(case, inputs))
        for _ in range(2):
            assert_right(case, inputs, *call(case, inputs, made))
    assert len(full_checks) == 4


def with_cache(change: Callable[[torch.Tensor], torch.Tensor], half: int) -> Callable[[BatchInputs], dict[str, Any]]:
    def changed(inputs: BatchInputs) -> dict[str, Any]:
        halves = list(inputs.kv[0])
        halves[half] = change(halves[half])
        return {"paged_kv_cache": tuple(halves)}

    return changed


WRONG: dict[str, Callable[[BatchInputs], dict[str, Any]]] = {
    "k off alignment": with_cache(shifted, 0),
    "v off alignment": with_cache(shifted, 1),
    "three halves": lambda inputs: {"paged_kv_cache": (*inputs.kv[0], inputs.kv[0][0])},
    "q of fewer rows": lambda inputs: {"q": inputs.q[1:]},
    "out off alignment": lambda inputs: {"out": shifted(inputs.q)},
    "return_lse is 1": lambda inputs: {"return_lse": 1},
    "k_scale is True": lambda inputs: {"k_scale": True},
    "k_scale is NaN": lambda inputs: {"k_scale": float("nan")},
    "enable_pdl is 1": lambda inputs: {"enable_pdl": 1},
    "another window": lambda inputs: {"window_left": 5},
}


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", WRONG)
def test_errors_after_a_good_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a first run, after runs of the same form or with values that compare equal."""
    monkeypatch.setattr(operands, "KERNEL_DEVICES", ("cpu",))
    inputs, errors = make(PAGED), []
    good = {"q": inputs.q, "paged_kv_cache": inputs.kv[0], "return_lse": True}
    equal = [{"k_scale": 1.0}, {"enable_pdl": True}, {"window_left": -1}]  # to values that are wrong
    buffers = {"out": torch.empty_like(inputs.q), "lse": torch.empty(inputs.q.shape[:2])}
    for before in ([], [{}, *equal, buffers, {"out": buffers["out"]}, {"lse": buffers["lse"]}]):
        made, _ = planned(PAGED)
        for extra in before:
            made.run(**good, **extra)
            made.run(**good, **extra)
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
            made.run(**{**good, **WRONG[name](inputs)})
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


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
        patch.setattr(fa2_prepared, "load", missing)
        prepared.cache_clear()  # of earlier tests
        with pytest.raises(RuntimeError, match="no kernel"):
            made.plan(**arguments)
    assert_right(PAGED, inputs, *call(PAGED, inputs, made))
