"""Paged prefill plans of few newest tokens per request, which "auto" gives to the kernels of decode."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_attn.emulator import Schedule, using
from tests.support import batch_case, right
from tests.support.batch_case import E4M3, BatchCase, call, dims, heads, make, paged, ragged
from tests.support.device_plan import emulated_device, moved
from tests.support.graphs import Captured, emulated_graph
from tests.support.right import Solver, assert_planned_right, assert_right, families, launched
from tests.support.schedules import KINDS, in_turn

pytestmark = pytest.mark.emulator

DRAFTS = paged((4, 4, 4), (65, 2, 140), 16, kv_dtype=E4M3, dtype="bfloat16", mask="causal", **heads(4, 1))

TAKEN = (
    DRAFTS,  # one request is shorter than its drafts
    dataclasses.replace(DRAFTS, qo_lens=(1, 1, 1), kv_lens=(65, 0, 7), mask="none", sinks=True),
    dataclasses.replace(DRAFTS, window_left=20, k_scale=0.5, v_scale=-1.25, tensor_scales=True, lse_base="ln"),
    paged((3, 3), (33, 40), 5, kv_dtype="nvfp4", cache="one", k_scale=0.5, mask="causal", **heads(4, 2)),
    dataclasses.replace(DRAFTS, qo_lens=(5, 5, 5), kv_lens=(65, 5, 140)),
    dataclasses.replace(DRAFTS, qo_lens=(6, 6, 6), **dims(256)),
    dataclasses.replace(DRAFTS, kv_dtype=None, **dims(256)),
    dataclasses.replace(DRAFTS, kv_dtype=None, **dims(128)),
    paged((2,), (150,), 1, kv_layout="HND", cache="strided", indices="int64", mask="causal", **heads(8, 1)),
    dataclasses.replace(DRAFTS, qo_lens=(0, 8, 3), sinks=True),  # two blocks of rows
    dataclasses.replace(DRAFTS, qo_lens=(2, 4, 0), slack=True),  # and rows of no request
)
LEFT: dict[str, BatchCase] = {
    "tokens that see later ones": dataclasses.replace(DRAFTS, mask="none"),
    "masks": dataclasses.replace(DRAFTS, mask="packed"),
    "multi-item scoring": dataclasses.replace(DRAFTS, qo_lens=(8, 8, 8), kv_lens=(65, 30, 140), mask="items"),
    "more rows than share two reads": dataclasses.replace(DRAFTS, qo_lens=(1, 9, 1)),
    "splits of their own": dataclasses.replace(DRAFTS, fixed_split_size=2),
    "no splits": dataclasses.replace(DRAFTS, disable_split_kv=True),
    "ragged keys": ragged((4, 4, 4), (65, 20, 140), dtype="bfloat16", mask="causal", **heads(4, 1)),
}


def kernels_of(batch: BatchCase, schedule: str = "eager", kernels: str = "auto") -> set[str]:
    """Plans twice and runs, both checked; returns the families of the kernels that ran."""
    with using("sm_90a", kernels=kernels, schedule=Schedule(schedule, 1), sms=2) as emulation:
        solver = Solver(batch, backend="emulator")
        solver.assert_right()
        solver.plan()
        solver.assert_right()
    return set(families(emulation)) - {"combine"}


@pytest.mark.parametrize(
    ("batch", "schedule"), in_turn(TAKEN, KINDS, lambda batch: batch.kv_dtype), ids=lambda x: getattr(x, "id", x)
)
def test_taken(batch: BatchCase, schedule: str) -> None:
    assert kernels_of(batch, schedule) == {"xqa"}


def test_a_plan_that_names_xqa_may_have_more_rows() -> None:
    """Up to 64 for each kv head, in several blocks."""
    batch = dataclasses.replace(DRAFTS, qo_lens=(4, 16, 9), kv_lens=(20, 33, 12), num_qo_heads=8, num_kv_heads=2)
    assert kernels_of(batch, kernels="xqa") == {"xqa"}


@pytest.mark.parametrize("batch", LEFT.values(), ids=LEFT)
def test_left_to_kernels_of_prefill(batch: BatchCase) -> None:
    assert kernels_of(batch) <= {"fa2", "fa3"}


def test_plans_in_turn() -> None:
    """Kernels follow the lengths of every plan, whichever came before."""
    uneven = dataclasses.replace(DRAFTS, qo_lens=(4, 2, 4))
    longer = dataclasses.replace(DRAFTS, kv_lens=(80, 30, 17))
    with using("sm_90a", sms=2) as emulation:
        planned = batch_case.wrapper(DRAFTS, backend="emulator")
        ran = []
        for batch in (DRAFTS, longer, uneven, dataclasses.replace(DRAFTS, qo_lens=(4, 9, 4)), longer):
            before = len(emulation.records)
            assert_planned_right(batch, planned)
            ran.append({record.spec["kernel"] for record in launched(emulation, before)} - {"combine"})
    assert ran == [{"xqa"}, {"xqa"}, {"xqa"}, {"fa2"}, {"xqa"}]


@pytest.mark.parametrize(("promise", "kernel"), [(None, "fa2"), (4, "xqa")])
def test_graphs_need_a_promise(promise: int | None, kernel: str) -> None:
    """A captured launch serves lengths that its first plan does not tell."""
    batch = dataclasses.replace(DRAFTS, kv_lens=(140, 140, 140))
    with using("sm_90a", sms=2) as emulation:
        captured = Captured(batch, "cpu", emulated_graph, promise, backend="emulator")
        for kv_lens in ((140, 140, 140), (4, 120, 33)):
            captured.replay(dataclasses.replace(batch, kv_lens=kv_lens))
    assert set(families(emulation)) - {"combine"} == {kernel}


@pytest.mark.parametrize(("bound", "kernel"), [(None, "fa2"), (9, "fa2"), (8, "xqa"), (4, "xqa")])
def test_lengths_on_the_device_need_a_bound(bound: int | None, kernel: str) -> None:
    batches = [dataclasses.replace(DRAFTS, qo_lens=qo_lens) for qo_lens in ((4, 1, 3), (0, 4, 4))]
    with using("sm_90a", sms=2) as emulation, emulated_device():
        planned = batch_case.wrapper(DRAFTS, backend="emulator")
        for batch in batches:
            inputs = make(batch)
            planned.plan(**moved(batch, inputs, "cpu"), max_token_per_sequence=bound, max_sequence_kv=140)
            assert_right(batch, inputs, *call(batch, inputs, planned))
    assert set(families(emulation)) - {"combine"} == {kernel}


def test_wrong_rows_touch_nothing_else() -> None:
    """Whatever the index arrays on the device say. The emulator refuses accesses outside of tensors."""
    batch, found = dataclasses.replace(DRAFTS, window_left=0), []
    with using("sm_90a", sms=2), emulated_device():
        planned, inputs = right.planned(batch, backend="emulator")
        for bounds in ((12, 8, 4, 0), (0, 4, 1 << 20, (1 << 20) + 4), (0, 4, 8, 12)):
            arguments = moved(batch, inputs, "cpu") | {"qo_indptr": torch.tensor(bounds, dtype=torch.int32)}
            planned.plan(**arguments, max_token_per_sequence=4)
            found.append(call(batch, inputs, planned)[0][:4])
    assert torch.equal(*found[1:])


def test_forward_over_all_keys() -> None:
    unmasked = dataclasses.replace(DRAFTS, mask="none")
    with using("sm_90a", sms=2):
        planned, inputs = right.planned(DRAFTS, backend="emulator")
        assert_right(unmasked, make(unmasked), *planned.forward(inputs.q, *inputs.kv, return_lse=True))


def test_lengths_written_after_a_plan() -> None:
    """More query tokens of a request than the plan was made for are left to kernels of prefill."""
    longer = dataclasses.replace(DRAFTS, qo_lens=(4, 9, 4))
    inputs = make(longer)
    with using("sm_90a", sms=2) as emulation:
        planned = batch_case.wrapper(DRAFTS, backend="emulator")
        planned.plan(**batch_case.plan_arguments(longer, inputs) | {"qo_indptr": make(DRAFTS).qo_indptr})
        planned._qo_indptr_buf.copy_(inputs.qo_indptr)
        assert_right(longer, inputs, *batch_case.call(longer, inputs, planned))
    assert set(families(emulation)) - {"combine"} == {"fa2"}
