"""What a wrapper keeps from plan to plan and run to run, and what it does not; CUDA-graph mode on CPU tensors; splits,
copies, forms of the lse, `uniform_q_len`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import cute_attn
from cute_attn import BatchDecodeWithPagedKVCacheWrapper
from cute_attn.dispatch import capabilities, select
from cute_attn.errors import ArgumentError, ArgumentTypeError, NotSupported, Refusal, RuntimeArgumentError
from cute_attn.problem import Features
from cute_attn.request import index_arrays
from cute_attn.request.batch_plan import Splits
from cute_attn.wrappers import graph as graph_buffers
from tests.support import graphs
from tests.support.batch_case import (
    WORKSPACE,
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
from tests.support.entry_points import ENTRIES
from tests.support.formula import assert_batch_right
from tests.support.right import planned
from tests.wrappers.kinds import (
    DECODE,
    IDS,
    KINDS,
    PAGED,
    RAGGED,
    eager_and_graph,
    made_for,
    plan_and_run,
    plan_case,
    run,
)

# ---- plan and run


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_nothing_of_a_plan_reaches_the_next(case: BatchCase) -> None:
    made = wrapper(case)
    changes: list[dict[str, Any]] = [
        {"window_left": 3},
        {"logits_soft_cap": 2.0},
        {"pos_encoding_mode": "ALIBI"},
        {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 100.0},
        {"sm_scale": -0.3},
        {"lse_base": "ln"},
        {"dtype": "bfloat16"},
        {"kv_dtype": "float8_e4m3fn"},
        {"kv_dtype": "nvfp4"},
        {"o_dtype": "float32"},
        {"fixed_split_size": 2},
        {"disable_split_kv": True},
        heads(6, 3),
    ]
    if case.kind != "decode":
        changes += [{"mask": "causal"}, {"mask": "custom"}, {"mask": "packed"}, {"head_dim_vo": 32}]
    for change in changes:
        plan_and_run(dataclasses.replace(case, **change), made)
        plan_and_run(case, made)


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_buffers_are_filled_and_returned(case: BatchCase) -> None:
    made, inputs = planned(case)
    wide = torch.full((case.rows, case.num_qo_heads + 1, 72), math.nan, dtype=torch.float16)
    out, lse = wide[:, :-1, :64], torch.full((case.rows, case.num_qo_heads), math.nan)
    returned = made.run(inputs.q, *inputs.kv, out=out, lse=lse, return_lse=True)
    assert returned[0] is out
    assert returned[1] is lse
    lse.fill_(math.nan)
    assert made.run(inputs.q, *inputs.kv, out=out, lse=lse) is out  # `lse` alone returns nothing more, but is filled
    assert_batch_right(case, inputs, out, lse)
    assert wide[:, -1].isnan().all()


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_workspace_may_be_replaced_and_of_any_dtype(case: BatchCase) -> None:
    made = wrapper(case)
    plan_and_run(case, made)
    for size, dtype in ((0, torch.uint8), (1000, torch.float32), (16, torch.int64)):
        made.reset_workspace_buffer(torch.empty(size, dtype=dtype), torch.empty(8, dtype=torch.uint8))
        plan_and_run(case, made)
    assert made.end_forward() is None
    assert made.is_cuda_graph_enabled is False


def test_lengths_given_twice_are_accepted() -> None:
    kv_lens = torch.tensor(PAGED.kv_lens)
    more = {"seq_lens": kv_lens, "max_sequence_kv": 40, "block_tables": torch.zeros(3, 9, dtype=torch.int32)}
    plan_and_run(DECODE, wrapper(DECODE), seq_lens=torch.tensor(DECODE.kv_lens), block_tables=None)
    qo_lens = {"seq_lens_q": torch.tensor(PAGED.qo_lens, dtype=torch.int32), "max_token_per_sequence": 17}
    plan_and_run(PAGED, wrapper(PAGED), **more, **qo_lens)


SCALES = {"sm_scale": torch.tensor(0.5)}, {"sm_scale": torch.full((2,), 0.5)}


@pytest.mark.parametrize("wrong", [{"causal": 1}, *SCALES, {"window_left": -1.0}], ids=str)
def test_what_only_equals_a_planned_option_is_refused(wrong: dict[str, Any]) -> None:
    case = dataclasses.replace(PAGED, mask="causal", sm_scale=0.5)
    made, inputs = planned(case)
    given = {"causal": True, "sm_scale": 0.5, "logits_soft_cap": 0.0, "rope_scale": 1.0, "rope_theta": 1e4}
    assert_batch_right(case, inputs, *made.forward_return_lse(inputs.q, *inputs.kv, **given))
    with pytest.raises(ArgumentTypeError, match=f"^{next(iter(wrong))} must be"):
        made.forward(inputs.q, *inputs.kv, **given | wrong)
    with pytest.raises(ArgumentTypeError, match=f"^{next(iter(wrong))} must be"):
        made.plan(**plan_arguments(case, inputs) | wrong)


# ---- decode


def test_positional_plan_of_decode() -> None:
    """In the order of FlashInfer's older releases, which its own tests still hold."""
    case = dataclasses.replace(DECODE, window_left=4, logits_soft_cap=3.0, dtype="bfloat16")
    made, inputs = wrapper(case), make(case)
    where = (inputs.kv_indptr, inputs.kv_indices, inputs.last_page_len)
    made.plan(*where, 4, 2, 64, 4, "NONE", 4, 3.0, "bfloat16", sm_scale=None)
    for window_left in (None, 4):  # a run may repeat what the plan said, and nothing else
        run(case, inputs, made, window_left=window_left)
    with pytest.raises(ArgumentError, match="the planned 4, got -1"):
        run(case, inputs, made, window_left=-1)
    with pytest.raises(TypeError, match="multiple values for argument 'window_left'"):
        made.plan(*where, 4, 2, 64, 4, "NONE", 4, window_left=4)


def test_q_len_of_a_run() -> None:
    case = decode((40, 3), q_len=2, page_size=4)
    made, inputs = planned(case)
    with pytest.warns(DeprecationWarning, match=r"belongs to plan\(\)"):
        made.run(inputs.q, *inputs.kv, q_len_per_req=2)
    with pytest.warns(DeprecationWarning, match="plan"), pytest.raises(ArgumentError, match="the planned 2, got 1"):
        made.run(inputs.q, *inputs.kv, q_len_per_req=1)
    with pytest.warns(DeprecationWarning, match="plan"), pytest.raises(ArgumentTypeError, match="must be an int"):
        made.run(inputs.q, *inputs.kv, q_len_per_req=2.0)


# ---- CUDA-graph mode


MASKED = dataclasses.replace(PAGED, mask="custom")
FROZEN: list[tuple[BatchCase, dict[str, Any], type[Exception], str]] = [
    (PAGED, {"qo_lens": (5, 17), "kv_lens": (3, 3)}, ArgumentError, "the batch size must stay 3"),
    (PAGED, {"qo_lens": (5, 1, 17)}, ArgumentError, r"qo_indptr\[-1\] must not exceed 22"),
    (PAGED, {"kv_lens": (160, 4, 1)}, ArgumentError, "must fit the 40 elements of their buffer, got 42"),
    (RAGGED, {"kv_lens": (40, 3, 34)}, ArgumentError, r"kv_indptr\[-1\] must not exceed 76"),
    (PAGED, {"mask": "custom"}, ArgumentError, "needs custom_mask_buf and mask_indptr_buf"),
    (MASKED, {"kv_lens": (40, 3, 90)}, ArgumentError, "must fit the 200 bytes of custom_mask_buf, got 217"),
    (DECODE, {"qo_lens": (2, 2, 2)}, RuntimeArgumentError, "q_len_per_req must stay 1 .*, got 2"),
    (PAGED, {"mask": "causal"}, RuntimeArgumentError, "causal must stay False"),
    (PAGED, {"window_left": 3}, RuntimeArgumentError, "window_left must stay -1"),
    (PAGED, {"logits_soft_cap": 3.0}, RuntimeArgumentError, "soft_cap must stay False"),
    (PAGED, {"sm_scale": 0.5}, RuntimeArgumentError, r"sm_scale must stay 0\.125"),
    (PAGED, {"dtype": "bfloat16"}, RuntimeArgumentError, r"q_dtype must stay torch\.float16"),
    (PAGED, {"kv_dtype": "nvfp4"}, RuntimeArgumentError, "kv_dtype must stay"),
    (PAGED, heads(8, 2), RuntimeArgumentError, "num_qo_heads must stay 4"),
    (PAGED, {"fixed_split_size": 2}, RuntimeArgumentError, "fixed_split_size must stay None"),
    (PAGED, {"disable_split_kv": True}, RuntimeArgumentError, "disable_split_kv must stay False"),
    (PAGED, {"lse_base": "ln"}, RuntimeArgumentError, "lse_scale must stay"),
    (PAGED, {"page_size": 8}, RuntimeArgumentError, "page_size must stay 4"),
    (
        RAGGED,
        {"slack": True, "qo_lens": (1, 2, 3), "kv_lens": (4, 5, 6)},
        RuntimeArgumentError,
        r"qo_indptr\[0\] must stay 0",
    ),
]


@pytest.mark.parametrize(("case", "change", "error", "message"), FROZEN, ids=[str(row[1]) for row in FROZEN])
def test_graph_mode_refuses(case: BatchCase, change: dict[str, Any], error: type[Exception], message: str) -> None:
    """The previous plan stays in force, with its numbers in the buffers."""
    made, buffers = graphs.graph_wrapper(case, "cpu", 40, 200)
    inputs = plan_case(case, made)
    held = {name: buffer.clone() for name, buffer in buffers.items()}
    other = dataclasses.replace(case, **change)
    with pytest.raises(error, match=message):
        plan_case(other, made)
    assert all(torch.equal(held[name], buffer) for name, buffer in buffers.items())
    run(case, inputs, made)
    if error is RuntimeArgumentError:  # a new start
        made.reset_workspace_buffer(torch.empty(WORKSPACE, dtype=torch.uint8))
        plan_and_run(other, made)


def test_cuda_graph_decode_wrapper() -> None:
    entry = ENTRIES["decode, CUDA graph's own wrapper"]
    made = entry.begin(entry.tensors).made  # type: ignore[attr-defined]
    assert isinstance(made, BatchDecodeWithPagedKVCacheWrapper)
    assert made.is_cuda_graph_enabled


# ---- selection


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_what_only_a_run_knows_moves_the_plan(case: BatchCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replans on a backend that supports it, if "auto" chose; later runs are right too."""
    narrow = capabilities.Backend("reference", "a stand-in that refuses sinks", ("cpu",), None)
    original, checked = select.reasons_against, []  # sinks, and a stride of 0

    def reasons(backend: capabilities.Backend, features: Features, arch: Any) -> list[Refusal]:
        if backend is narrow and features.sinks:
            return [Refusal("narrow", "attention sinks", "it has none", "no sinks")]
        return original(backend, features, arch)

    def chosen(features: Features, name: str, load: capabilities.Load) -> capabilities.Backend:
        checked.append((features.sinks, features.expanded))
        return capabilities.BY_NAME["reference"] if features.sinks and name == "auto" else narrow

    monkeypatch.setattr(select, "reasons_against", reasons)
    monkeypatch.setattr(select, "chosen", chosen)
    with_sinks = dataclasses.replace(case, sinks=True)
    made, inputs = wrapper(case), make(with_sinks)
    made.plan(**plan_arguments(case, inputs))
    for now in (case, with_sinks, case, with_sinks):
        run(now, inputs if now.sinks else dataclasses.replace(inputs, sinks=None), made)
    assert checked == [(False, False), (True, False)]
    made.plan(**plan_arguments(case, inputs))
    call(with_sinks, dataclasses.replace(inputs, q=inputs.q[:, :1].expand(-1, case.num_qo_heads, -1)), made)
    assert checked[-1] == (True, True)
    named = wrapper(case, backend="reference")
    named.plan(**plan_arguments(case, inputs))
    with pytest.raises(NotSupported, match="narrow refuses attention sinks"):
        call(with_sinks, inputs, named)


def test_pinned_page_numbers_are_read_before_plan_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy out of pinned memory goes on while the host fills it for the next plan."""
    waits: list[bool] = []
    copy, at_once = torch.Tensor.copy_, index_arrays.copied_at_once

    def recorded(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if source.is_pinned():
            waits.append(not non_blocking)
        return copy(target, source, non_blocking=non_blocking)

    inputs = make(DECODE)
    arguments = plan_arguments(DECODE, inputs)
    made, _ = graphs.graph_wrapper(DECODE, "cpu", 64, 0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x.data_ptr() == arguments["indices"].data_ptr())
    monkeypatch.setattr(torch.Tensor, "copy_", recorded)
    monkeypatch.setattr(graph_buffers, "copied_at_once", lambda x, _: at_once(x, torch.device("cuda")))
    made.plan(**arguments)
    monkeypatch.setattr(graph_buffers, "is_capturing", lambda _: True)  # where waiting is an error
    made.plan(**arguments)
    assert waits == [True, False]


@pytest.mark.parametrize(
    ("source", "pinned", "target", "waits"),
    [
        ("cuda", False, "cpu", True),
        ("cpu", True, "cuda", True),
        ("cpu", False, "cuda", False),
        ("cuda", False, "cuda", False),
        ("cpu", True, "cpu", False),
    ],
)
def test_copies_that_end_before_plan_returns(source: str, pinned: bool, target: str, waits: bool) -> None:
    """Those of pinned memory, and those to the CPU, where the host reads them."""
    asked: dict[str, Any] = {}
    array: Any = mock.Mock(is_cpu=source == "cpu", is_cuda=source == "cuda")
    array.is_pinned.return_value, array.to = pinned, lambda _, **options: asked.update(options) or torch.ones(1)
    index_arrays.there(array, torch.device(target))
    assert asked == {"non_blocking": not waits}


# ---- splits, as engines ask for them


def planned_splits(case: BatchCase, graph: bool, **splits: Any) -> Splits:
    made = made_for(case, graph)
    plan_and_run(case, made, **splits)
    limits = made._planned().limits
    return Splits(limits.fixed_split_size, limits.disable_split_kv)


@eager_and_graph
@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_minus_one_is_none_and_disabling_wins(case: BatchCase, graph: bool) -> None:
    assert planned_splits(case, graph, fixed_split_size=-1) == Splits(None, False)
    assert planned_splits(case, graph, fixed_split_size=-1, disable_split_kv=True) == Splits(None, True)
    assert planned_splits(case, graph, fixed_split_size=4096, disable_split_kv=True) == Splits(None, True)
    assert planned_splits(case, graph, fixed_split_size=2, disable_split_kv=False) == Splits(2 * case.page_size, False)


# ---- copies, which would share schedules with the original

MADE: tuple[Callable[..., Any], ...] = (
    cute_attn.BatchDecodeWithPagedKVCacheWrapper,
    cute_attn.BlockSparseAttentionWrapper,
    functools.partial(cute_attn.MultiLevelCascadeAttentionWrapper, 2),
    cute_attn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
@pytest.mark.parametrize("made", MADE)
def test_copies_are_refused(made: Callable[..., Any], copied: Callable[[Any], Any]) -> None:
    wrapper = made(torch.zeros(1 << 16, dtype=torch.uint8))
    with pytest.raises(ArgumentTypeError, match=f"a {type(wrapper).__name__} cannot be copied.*Construct another"):
        copied(wrapper)


# ---- forms of the lse of a run


@pytest.mark.parametrize("of_plan", ["log2", "ln"])
@pytest.mark.parametrize("case", KINDS[:2], ids=IDS[:2])
def test_base_and_layout(case: BatchCase, of_plan: str, device: str) -> None:
    case = dataclasses.replace(case, lse_base=of_plan)
    made, inputs = planned(case, device)
    out, lse = made.run(inputs.q, *inputs.kv, return_lse=True)
    in_log2 = lse if of_plan == "log2" else lse / math.log(2)
    for base, factor in ((None, 1.0 if of_plan == "log2" else math.log(2)), ("log2", 1.0), ("ln", math.log(2))):
        for layout in ("NH", "HN"):
            wanted = (in_log2 * factor).t() if layout == "HN" else in_log2 * factor
            form = {"lse_base": base, "lse_layout": layout, "return_lse": True}
            returned = made.run(inputs.q, *inputs.kv, **form)
            assert torch.equal(returned[0], out)
            torch.testing.assert_close(returned[1], wanted, rtol=1e-6, atol=0)
            assert returned[1].is_contiguous()
            buffer = torch.full_like(wanted, math.nan, memory_format=torch.contiguous_format)
            for return_lse in (True, False):
                result = made.run(inputs.q, *inputs.kv, **{**form, "return_lse": return_lse}, lse=buffer)
                assert not return_lse or result[1] is buffer
                torch.testing.assert_close(buffer, wanted, rtol=1e-6, atol=0)
                buffer.fill_(math.nan)
    assert torch.equal(made.run(inputs.q, *inputs.kv, lse_layout="HN"), out)
    assert torch.equal(made.run_return_lse(inputs.q, *inputs.kv)[1], lse)


# ---- uniform_q_len


@pytest.mark.parametrize("kind", [paged, ragged], ids=IDS[:2])
def test_uniform_q_len(kind: Any) -> None:
    """With CUDA graphs captured launches are made for that many tokens per request, and later plans must keep them."""
    case = kind((4, 4, 4), (40, 9, 33), **heads(4, 2))
    made = made_for(case)
    for seed in range(3):
        other = dataclasses.replace(case, seed=seed)
        plan_case(other, made, uniform_q_len=4)
        assert made._planned().limits.sizes.max_qo_len == made._planned().limits.max_qo_len == 4
        run(other, make(other), made)
    for q_len in (None, 0, 2):
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(RuntimeArgumentError, match="uniform_q_len must stay 4 with use_cuda_graph=True, got None"),
        ):
            plan_case(case, made, uniform_q_len=q_len)


@pytest.mark.parametrize("case", KINDS[:2], ids=IDS[:2])
def test_an_untrue_uniform_q_len_warns(case: BatchCase) -> None:
    made = made_for(case)
    with pytest.warns(UserWarning, match="uniform_q_len=5 does not describe this batch.* 0 to 17 query tokens"):
        plan_case(case, made, uniform_q_len=5)
    assert made._planned().limits.sizes.max_qo_len is None
    run(case, make(case), made)
    with pytest.raises(ArgumentTypeError, match="uniform_q_len must be an int"):
        plan_case(case, made, uniform_q_len=5.0)
