"""What engines read of a wrapper, and lengths that they write into its index buffers after `plan`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, NotPlannedError, RuntimeArgumentError
from cute_attn.request.settings import Call
from cute_attn.request.single import problem
from cute_attn.wrappers import engine_attributes
from tests.support.batch_case import (
    NO_PAGE,
    BatchCase,
    call,
    decode,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    wrapper,
)
from tests.support.formula import assert_batch_right
from tests.wrappers.kinds import IDS, KINDS, PAGED, eager_and_graph, made_for, plan_case, run

OPTIONS = ("_sm_scale", "_window_left", "_logits_soft_cap", "_causal", "_pos_encoding_mode", "_rope_scale")
BUFFERS = ("_qo_indptr_buf", "_kv_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf")


def planned(case: BatchCase, graph: bool = False) -> Any:
    made = made_for(case, graph)
    plan_case(case, made)
    return made


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_before_a_plan(case: BatchCase) -> None:
    made = wrapper(case)
    for name in (*OPTIONS, "_num_qo_heads", "_cached_q_data_type"):
        assert not hasattr(made, name), name
        with pytest.raises(NotPlannedError, match="no plan yet"):
            getattr(made, name)
    for name in (*BUFFERS, "_paged_kv_indices_buf", "_plan_info", "_max_total_num_rows", "_custom_mask_buf"):
        assert getattr(made, name) is None, name
    assert made.resolved_backend == "auto"
    assert made._fixed_batch_size == 0
    for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
        assert getattr(made, name).dtype == torch.uint8
    made.reset_workspace_buffer(torch.empty(64, dtype=torch.uint8), made._int_workspace_buffer)


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_options_are_those_given(case: BatchCase) -> None:
    """vLLM compares them with what it passed in every forward."""
    case = dataclasses.replace(case, window_left=7, logits_soft_cap=30.0, sm_scale=0.11, mask="causal")
    made = planned(case)
    assert (made._window_left, made._logits_soft_cap, made._sm_scale) == (7, 30.0, 0.11)
    assert made._causal is (case.kind != "decode")
    assert made._pos_encoding_mode == "NONE"
    assert (made._num_qo_heads, made._num_kv_heads, made._batch_size) == (4, 2, 3)
    assert made._cached_q_data_type == made._cached_kv_data_type == made._cached_o_data_type == torch.float16
    assert made._max_kv_len == 40
    assert made._max_q_len == max(case.qo_lens)
    assert made._qo_indptr_last == case.rows
    assert made._plan_info is made._planned()
    assert made.resolved_backend == "reference"
    assert made._kv_layout == "NHD"
    made.prewarm_paged_kv_stride_variant()
    with pytest.raises(KeyError, match="variant must be one of 'independent'"):
        made.prewarm_paged_kv_stride_variant("joint")
    inputs = make(case)
    made.forward(inputs.q, *inputs.kv, sm_scale=0.25)
    assert (made._window_left, made._logits_soft_cap, made._sm_scale, made._causal) == (-1, 0.0, 0.25, False)
    for name in (*OPTIONS, *BUFFERS):
        with pytest.raises(AttributeError):
            setattr(made, name, None)


def test_an_option_that_was_not_given() -> None:
    made = planned(dataclasses.replace(PAGED, logits_soft_cap=0.0, sm_scale=None))
    assert made._sm_scale is None
    made.plan(**{**plan_arguments(PAGED, make(PAGED)), "logits_soft_cap": None})
    assert made._logits_soft_cap == 0.0


@pytest.mark.parametrize(
    "changes", [{}, {"disable_split_kv": True}, {"fixed_split_size": 1}, {"mask": "items"}], ids=str
)
def test_batches_of_newest_tokens_are_decode(changes: dict[str, Any]) -> None:
    """Unless their results must not depend on other requests, or rows see keys that decode has no mask for."""
    few = paged((1, 1), (40, 3), **heads(4, 2))
    features = planned(dataclasses.replace(few, **changes))._planned().settings.features
    assert features.decode is not any(changes)


@eager_and_graph
@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_index_buffers_hold_the_plan(case: BatchCase, graph: bool) -> None:
    inputs, made = make(case), planned(case, graph)
    held: dict[str, Any] = dict.fromkeys(BUFFERS)
    held["_qo_indptr_buf"] = inputs.qo_indptr
    if case.kind == "ragged":
        held["_kv_indptr_buf"] = inputs.kv_indptr
    else:
        held["_paged_kv_indptr_buf"] = inputs.kv_indptr
        held["_paged_kv_last_page_len_buf"] = inputs.last_page_len
        used = int(inputs.kv_indptr[-1])
        assert torch.equal(made._paged_kv_indices_buf[:used], inputs.kv_indices[:used])
        assert (made._paged_kv_indices_buf[used:] == NO_PAGE).all()
    for name, value in held.items():
        buffer = getattr(made, name)
        assert (buffer is None) == (value is None), name
        if value is not None:
            assert buffer.dtype == torch.int32
            assert buffer.tolist() == value.tolist()
    assert made._max_total_num_rows == (case.rows if graph else None)
    run(case, inputs, made)


@eager_and_graph
def test_mask_buffers(graph: bool) -> None:
    made = planned(dataclasses.replace(PAGED, mask="custom"), graph)
    assert made._custom_mask_buf.dtype == torch.uint8
    assert made._mask_indptr_buf.tolist() == [0, 25, 25, 96]


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_lengths_written_after_a_plan_count(inference: bool) -> None:
    """vLLM plans upper bounds and then writes the exact lengths, which only its device knows."""
    exact = (38, 1, 33)
    with torch.inference_mode(inference), torch.no_grad():
        inputs, made = make(PAGED), planned(PAGED)
        run(PAGED, inputs, made)
        requests = zip(inputs.requests, exact, strict=True)
        shorter = [dataclasses.replace(r, k=r.k[:n], v=r.v[:n]) for r, n in requests]
        for _ in range(2):
            made.plan(**plan_arguments(PAGED, inputs))
            made._paged_kv_last_page_len_buf.copy_(torch.tensor([2, 1, 1]))
            results = call(PAGED, inputs, made)
            assert_batch_right(
                dataclasses.replace(PAGED, kv_lens=exact), dataclasses.replace(inputs, requests=shorter), *results
            )
            assert made._max_kv_len == 38
            made._paged_kv_last_page_len_buf[0] = 1
            made._paged_kv_last_page_len_buf[1] = 3
            before = made._planned()
            assert made._planned() is before  # unwritten copies are not scheduled again
            made._paged_kv_indptr_buf.sub_(0)
            assert made._planned() is not before
        made.plan(**plan_arguments(PAGED, inputs))
        run(PAGED, inputs, made)


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_lengths_written_before_forward_count_too(case: BatchCase) -> None:
    made, inputs = planned(case), make(case)
    made.forward(inputs.q, *inputs.kv, sm_scale=0.3)
    name = "_kv_indptr_buf" if case.kind == "ragged" else "_paged_kv_indptr_buf"
    getattr(made, name).zero_()
    for out in (made.forward(inputs.q, *inputs.kv, sm_scale=0.3), made.run(inputs.q, *inputs.kv)):
        assert (out == 0).all()  # no request has a key
    assert made._sm_scale == 0.3


def test_wrong_lengths_written_after_a_plan_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made, inputs = planned(PAGED), make(PAGED)
    made._paged_kv_last_page_len_buf.fill_(5)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"_paged_kv_last_page_len_buf must be within 1\.\.4"):
            made.run(inputs.q, *inputs.kv)
    made._paged_kv_last_page_len_buf.fill_(4)
    monkeypatch.setattr(engine_attributes, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeArgumentError, match="_paged_kv_last_page_len_buf was written after plan"):
        made.run(inputs.q, *inputs.kv)
    monkeypatch.undo()
    for mask in ("custom", "items"):
        masked = planned(dataclasses.replace(PAGED, mask=mask))
        masked._paged_kv_indptr_buf.zero_()
        with pytest.raises(RuntimeArgumentError, match="the mask belongs to the planned lengths"):
            masked.run(inputs.q, *inputs.kv)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_default_scale(head_dim: int) -> None:
    """The bits of Python's `head_dim ** -0.5`, which engines compare with."""
    dims = {"head_dim_qk": head_dim, "head_dim_vo": head_dim}
    for case in (paged((2,), (3,), **dims), ragged((2,), (3,), **dims), decode((3,), **dims)):
        made = planned(case)
        assert made._planned().settings.sm_scale == head_dim**-0.5
    q = torch.zeros(1, 1, head_dim, dtype=torch.float16)
    assert problem(Call(q, q, q)).settings.sm_scale == head_dim**-0.5
