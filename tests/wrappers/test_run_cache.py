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
from tests.kernels.test_fa2_batch import on_fa2
from tests.support import batch_case
from tests.support.batch_case import (
    E4M3,
    BatchCase,
    BatchInputs,
    call,
    check,
    decode,
    dims,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
)
from tests.support.case import shifted
from tests.support.formula import assert_batch_right
from tests.support.noted import noted
from tests.support.right import assert_right
from tests.wrappers.kinds import KINDS

__all__ = ["on_fa2"]  # a fixture: calls with CPU tensors go to fa2's host side, whose launches do nothing

PAGED = paged((5, 17), (40, 33), page_size=4, mask="causal", **heads(4, 2))
LAYERS = (
    PAGED,
    paged((5, 17), (40, 33), page_size=4, mask="custom", cache="one", kv_layout="HND"),
    paged((5, 17), (40, 33), page_size=5, cache="list", fixed_split_size=2, o_dtype="float32"),
    paged((5, 17), (40, 33), cache="strided", window_left=7, lse_base="ln", return_lse=False),
    ragged((5, 17), (300, 33), mask="causal", **dims(192, 128)),
    ragged((5, 17), (40, 33), cache="strided", kv_layout="HND", kv_dtype=E4M3),
    ragged((5, 17), (40, 33), cache="halves", kv_dtype=E4M3, **heads(4, 2)),
    decode((400, 3, 90), **heads(8, 2)),
    decode((40, 3), page_size=1, cache="one", q_len=2, k_scale=0.5, v_scale=3.0),
    paged((5, 17), (40, 33), page_size=4, mask="causal", sinks=True, **heads(4, 2)),
    decode((900, 3, 90), sinks=True, **heads(8, 2)),
)


def elsewhere(x: Any) -> Any:
    """The same numbers at other addresses; the old memory becomes poison."""
    if not isinstance(x, torch.Tensor):
        return type(x)(map(elsewhere, x))
    storage = x.untyped_storage()
    copy = torch.empty(0, dtype=x.dtype).set_(storage.clone()).as_strided(x.shape, x.stride(), x.storage_offset())
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x7F)
    return copy


def layers(case: BatchCase) -> BatchInputs:
    """Inputs whose numbers the expected results do not share memory with."""
    inputs = make(case)
    kept = [dataclasses.replace(request, q=request.q.clone()) for request in inputs.requests]
    return dataclasses.replace(inputs, requests=kept)


def planned(case: BatchCase) -> tuple[Any, BatchInputs]:
    inputs = layers(case)
    return wrapper_of(case, inputs), inputs


def wrapper_of(case: BatchCase, inputs: BatchInputs, backend: str = "emulator") -> Any:
    made = batch_case.wrapper(case, backend=backend)
    made.plan(**plan_arguments(case, inputs))
    return made


@pytest.fixture
def emulated() -> Iterator[None]:
    """The kernels themselves, without `on_fa2`."""
    with using("sm_90a", kernels="fa2", sms=4):
        yield


@pytest.fixture
def full_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs that were checked in full."""
    return noted(monkeypatch, batch_run, "problem")


ON_KERNELS = [("fa2", case) for case in LAYERS]
ON_KERNELS += [("fa3", paged((3, 5), (21, 48), mask="causal", cache=cache, **heads(4, 2))) for cache in ("one", "pair")]
ON_KERNELS += [("fa3", paged((70, 3), (300, 33), mask="causal", sinks=True, **heads(4, 2)))]
ON_KERNELS += [("xqa", decode((300, 3, 90), sinks=True, **heads(8, 2)))]


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("kernels", "case"), ON_KERNELS, ids=lambda x: getattr(x, "id", x))
def test_layers(kernels: str, case: BatchCase, full_checks: list[Any]) -> None:
    with using("sm_90a", kernels=kernels, sms=4):
        made, inputs = planned(case)
        for _ in range(3):
            sinks = None if inputs.sinks is None else inputs.sinks + 1
            inputs = dataclasses.replace(inputs, q=elsewhere(inputs.q), kv=elsewhere(inputs.kv), sinks=sinks)
            assert_right(case, inputs, *call(case, inputs, made))
    assert len(full_checks) == len(made._planned().cached_runs) == 1


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated")
def test_sinks_are_checked_in_every_run(full_checks: list[Any]) -> None:
    case = dataclasses.replace(PAGED, sinks=True)
    made, inputs = planned(case)
    sinks = torch.linspace(-1, 2, case.num_qo_heads)
    for _ in range(2):
        call(case, dataclasses.replace(inputs, sinks=sinks), made)
    assert len(full_checks) == 1
    with pytest.raises(ArgumentError, match="sinks must be finite"):
        call(case, dataclasses.replace(inputs, sinks=torch.full_like(sinks, torch.inf)), made)
    halves = dataclasses.replace(inputs, sinks=sinks.half())
    for _ in range(2):  # are copied
        assert check(case, halves, *call(case, halves, made)).ok
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
    made, inputs = planned(PAGED)
    inputs = dataclasses.replace(inputs, q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1))
    for _ in range(2):
        out, lse = call(PAGED, inputs, made)
        assert out.is_contiguous()
        assert_right(PAGED, inputs, out, lse)
    assert len(full_checks) == 1


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated")
def test_a_callers_buffers(full_checks: list[Any]) -> None:
    made, inputs = planned(PAGED)
    for _ in range(3):
        out, lse = (torch.full_like(x, torch.nan) for x in call(PAGED, inputs, wrapper_of(PAGED, inputs)))
        results = call(PAGED, inputs, made, out=out, lse=lse)
        assert results[0] is out
        assert results[1] is lse
        assert_right(PAGED, inputs, out, lse)
    assert sum(check.args[1].out is not None for check in full_checks) == 1


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("backend", "base"),
    [*(("auto", case) for case in KINDS), pytest.param("emulator", PAGED, marks=pytest.mark.emulator)],
)
def test_options_of_each_run(backend: str, base: BatchCase) -> None:
    """Those that differ, in whatever order they come, and those that are equal but not the same."""
    inputs = layers(base)
    made, right = wrapper_of(base, inputs, backend), assert_right if backend == "emulator" else assert_batch_right
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
    made, inputs = planned(PAGED)
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


@pytest.mark.parametrize("name", WRONG)
def test_errors_after_a_good_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a first run, after runs of the same form or with values that compare equal."""
    monkeypatch.setattr(operands, "KERNEL_DEVICES", ("cpu",))
    inputs, errors = make(PAGED), []
    good = {"q": inputs.q, "paged_kv_cache": inputs.kv[0], "return_lse": True}
    equal = [{"k_scale": 1.0}, {"enable_pdl": True}, {"window_left": -1}]  # to values that are wrong
    buffers = {"out": torch.empty_like(inputs.q), "lse": torch.empty(inputs.q.shape[:2])}
    for before in ([], [{}, *equal, buffers, {"out": buffers["out"]}, {"lse": buffers["lse"]}]):
        made = wrapper_of(PAGED, inputs, "auto")
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
    made, inputs = planned(PAGED)
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
