"""The wrappers over fa2's host side: what they hand over, judged by the interpreter of the kernels' contract."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from cute_attn import WorkspaceError, select
from cute_attn.backends import fa2_batch, fa2_kernels
from cute_attn.kernels.spec import Tile
from cute_attn.problem import BatchLengths, BatchLimits, Settings
from cute_attn.runtime.arch import named
from cute_attn.runtime.staging import Staging
from tests.batch_case import (
    SMALL,
    BatchCase,
    call,
    check,
    make,
    plan_arguments,
    random_batch_case,
    random_lengths,
    wrapper,
)
from tests.fa2_contract import InterpretedLaunch
from tests.matrix import poisoned_memory
from tests.test_batch_lifecycle import DECODE, PAGED, RAGGED, graph_wrapper

ARCH = named("sm_90a")
SMS = 66
TILE = Tile(16, 16, 1, 1, 2)  # small: small batches then have many


def plan(settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging) -> fa2_batch.Planned:
    return fa2_batch.Planned(settings, fa2_batch.scheduled(settings, lengths, limits, ARCH, SMS), staging, ARCH, 0)


@pytest.fixture(autouse=True)
def on_fa2(monkeypatch: pytest.MonkeyPatch) -> None:
    InterpretedLaunch.fired = []
    fa2_kernels.load.cache_clear()
    fa2_batch.ready.cache_clear()
    monkeypatch.setattr(fa2_kernels, "Launch", InterpretedLaunch)
    monkeypatch.setattr(fa2_kernels, "artifacts", types.SimpleNamespace(get=lambda spec, arch: spec))
    monkeypatch.setattr(fa2_batch, "current_stream", lambda index: 77)
    monkeypatch.setattr(
        fa2_batch, "tiles", types.SimpleNamespace(choose=lambda *args: TILE, resident_ctas=lambda *args: 2)
    )
    backend = types.SimpleNamespace(name="fa2", plan=plan, workspace=fa2_batch.workspace)
    monkeypatch.setattr(fa2_batch, "for_device", lambda index: ARCH)
    monkeypatch.setattr(fa2_batch, "multiprocessors", lambda index: SMS)
    monkeypatch.setattr(select, "chosen", lambda features, name: backend)
    monkeypatch.setattr(select, "reasons_against", lambda *args: [])


def assert_right(case: BatchCase, made: Any = None) -> None:
    inputs = make(case)
    if made is not None:
        made.plan(**plan_arguments(case, inputs))
    with poisoned_memory():
        out, lse = call(case, inputs, made)
    verdict = check(case, inputs, out, lse)
    assert verdict.ok, f"{case}: {verdict.detail}"


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_small(case: BatchCase) -> None:
    assert_right(case)


@pytest.mark.parametrize("seed", range(60))
def test_random(seed: int) -> None:
    assert_right(random_batch_case(seed, max_len=150, max_batch=4))


@pytest.mark.parametrize("case", [PAGED, RAGGED, DECODE], ids=["paged", "ragged", "decode"])
def test_graph_launches_keep_their_form(case: BatchCase) -> None:
    """Over plans of other lengths: what a captured graph holds is what a new launch would get."""
    case = dataclasses.replace(case, kv_lens=(40, 3, 33))
    made, _ = graph_wrapper(case)
    inputs = make(case)
    q = inputs.q.clone()
    made.plan(**plan_arguments(case, inputs))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    made.run(q, *inputs.kv, out=out, lse=lse)
    held = [(launch.params, launch.grid) for launch in InterpretedLaunch.fired]
    for seed in range(3):
        InterpretedLaunch.fired = []
        other = random_lengths(case, seed, 25)
        rows = dataclasses.replace(other, qo_lens=case.qo_lens)  # a run sees as many rows as were captured
        made.plan(**plan_arguments(rows, make(rows)))
        made.run(q, *inputs.kv, out=out, lse=lse)
        assert [(launch.params, launch.grid) for launch in InterpretedLaunch.fired] == held


@pytest.mark.parametrize("splits", [{}, {"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_workspace_size_is_enough(splits: dict[str, Any], graph: bool) -> None:
    """With exactly that many bytes the schedule is that of a large workspace; with fewer, fixed splits are refused."""
    case = dataclasses.replace(DECODE, kv_lens=(140, 3, 90), **splits)
    made = graph_wrapper(case, pages=60)[0] if graph else wrapper(case)
    arguments = plan_arguments(case, make(case))
    float_bytes, int_bytes = made.workspace_size(**arguments)
    assert (float_bytes > 0) == (splits != {"disable_split_kv": True})
    assert int_bytes > 0
    assert made._plan is None
    made.plan(**arguments)
    records = made._planned().launch.records
    if not graph:  # the room of captured launches follows from the workspace
        assert records.nbytes == int_bytes
    made.reset_workspace_buffer(torch.empty(float_bytes, dtype=torch.uint8))
    made.plan(**arguments)
    if not graph:
        assert torch.equal(made._planned().launch.records, records)
    assert_right(case, made)
    if "fixed_split_size" in splits and not graph:
        made.reset_workspace_buffer(torch.empty(float_bytes - 1, dtype=torch.uint8))
        with pytest.raises(WorkspaceError, match=f"must have {float_bytes} bytes"):
            made.plan(**arguments)
