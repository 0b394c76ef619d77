"""FlashInfer's TRT-LLM prefill functions: numbers on every executor, forms of arguments, refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from cute_attn import trtllm_batch_context_with_kv_cache, trtllm_fmha_v2_prefill, trtllm_ragged_attention_deepseek
from cute_attn.errors import ArgumentError, NotSupported
from cute_attn.wrappers import planned_prefill
from tests.support.batch_case import BatchCase, make, paged, ragged
from tests.support.executors import Executor
from tests.support.launch_corpus import RecordingDriver
from tests.support.noted import noted
from tests.support.right import assert_right
from tests.support.trtllm_prefill import context_arguments, lengths, numbers, workspace

CASE = paged((3, 1, 17, 0), (40, 1, 17, 5), mask="causal", return_lse=True)
CONTEXT = {
    "causal": CASE,
    "bidirectional": paged((3, 20), (33, 20), kv_layout="HND", return_lse=True),
    "window": paged((5, 30), (64, 90), mask="causal", window_left=11, kv_layout="HND", cache="one", return_lse=True),
    "sinks": paged((5, 30), (64, 90), mask="causal", sinks=True, num_qo_heads=4, return_lse=True),
    "tensors": paged((5, 9), (24, 9), mask="causal", sm_scale=0.3, v_scale=1.5, tensor_scales=True, return_lse=True),
    "keyless": paged((4, 2), (0, 3), mask="causal", page_size=3, return_lse=True),
    "bf16": paged((4, 2), (30, 3), mask="causal", dtype="bfloat16", head_dim_qk=128, head_dim_vo=128),
}


def fmha_v2_arguments(case: BatchCase, layout: str, device: str) -> tuple[Any, dict[str, Any]]:
    """A case and the keywords of `trtllm_fmha_v2_prefill`, with its tensors in one of the input layouts."""
    inputs = make(case, device)
    if layout.startswith("Q_PAGED"):
        qkv, extra = (inputs.q, inputs.kv[0]), {"block_tables": inputs.tables}
    else:
        k, v = (x[: sum(case.kv_lens)] for x in inputs.kv)
        packed = {"PACKED_QKV": lambda: torch.stack((inputs.q, k, v), 1)}
        packed |= {"CONTIGUOUS_Q_KV": lambda: (inputs.q, torch.stack((k, v), 1))}
        qkv, extra = packed.get(layout, lambda: (inputs.q, k, v))(), {}
    arguments = {"qkv": qkv, "input_layout": layout, "workspace_buffer": workspace(device)}
    arguments |= {"mask_mode": "causal" if case.mask == "causal" else "padding"}
    if case.logits_soft_cap:
        arguments["logits_soft_cap_scale"] = case.logits_soft_cap
    if case.pos_encoding_mode == "ALIBI":
        arguments["pos_encoding_mode"] = "alibi"
    return inputs, arguments | extra | lengths(case, device) | numbers(case, inputs)


FMHA_V2 = [
    ("PACKED_QKV", ragged((5, 1, 20), (5, 1, 20), num_qo_heads=2, num_kv_heads=2, mask="causal")),
    ("PACKED_QKV", ragged((5, 1, 20), (5, 1, 20), num_qo_heads=2, num_kv_heads=2)),
    ("CONTIGUOUS_Q_KV", ragged((5, 2), (30, 2), mask="causal", window_left=7)),
    ("CONTIGUOUS_Q_KV", ragged((5, 2), (30, 2), mask="causal", logits_soft_cap=2.0)),
    ("SEPARATE_Q_K_V", ragged((5, 2), (30, 2), mask="causal", sinks=True)),
    ("SEPARATE_Q_K_V", ragged((5, 2), (30, 2), mask="causal", pos_encoding_mode="ALIBI")),
    ("Q_PAGED_KV_NHD", paged((5, 20), (30, 20), mask="causal", cache="one")),
    ("Q_PAGED_KV_HND", paged((5, 20), (30, 20), kv_layout="HND", v_scale=0.5)),
]


@pytest.mark.parametrize(("layout", "case"), FMHA_V2, ids=[f"{n}-{layout}" for n, (layout, _) in enumerate(FMHA_V2)])
def test_fmha_v2(executor: Executor, layout: str, case: BatchCase) -> None:
    inputs, arguments = fmha_v2_arguments(case, layout, executor.device)
    assert_right(case, inputs, trtllm_fmha_v2_prefill(**arguments, backend=executor.backend), None)


@pytest.mark.parametrize(
    ("changes", "unit"),
    [
        ({}, 1.0),
        ({"sm_scale": 0.3}, 0.3 * math.sqrt(64)),
        ({"sm_scale": 0.3, "tensor_scales": True}, 0.3 * math.sqrt(64)),
        ({"logits_soft_cap": 2.0, "sm_scale": 0.3}, math.sqrt(64)),
        ({"sm_scale": 0.0}, 0.0),
    ],
    ids=str,
)
def test_fmha_v2_statistics(changes: dict[str, Any], unit: float) -> None:
    """A maximum in units of q.k / sqrt(head_dim) and a sum per row, from which the natural-log lse follows."""
    case = paged((4, 2), (0, 3), mask="causal", return_lse=True, **changes)
    assert case.head_dim_qk == 64
    inputs, arguments = fmha_v2_arguments(case, "Q_PAGED_KV_NHD", "cpu")
    if case.tensor_scales:
        arguments["bmm1_scale"] = arguments["bmm1_scale"].view(1, 1, 1)
    out, stats = trtllm_fmha_v2_prefill(**arguments, save_softmax_stats=True)
    assert stats.shape == (*out.shape[:2], 2)
    assert stats.isfinite().all()
    lse = (stats[..., 0] * unit + stats[..., 1].log()) / math.log(2)
    assert_right(case, inputs, out, lse)


CHUNKS = [
    ("PACKED_QKV", ragged((50, 1, 20), (50, 1, 20), num_qo_heads=2, num_kv_heads=2), 8),
    ("SEPARATE_Q_K_V", ragged((5, 9, 0, 70), (30, 4, 3, 200), sinks=True), 64),
    ("CONTIGUOUS_Q_KV", ragged((5, 2), (30, 2), logits_soft_cap=2.0), 7),
    ("Q_PAGED_KV_NHD", paged((5, 20), (30, 20), cache="one"), 16),
    ("Q_PAGED_KV_HND", paged((33, 2), (40, 20), kv_layout="HND", v_scale=0.5), 3),
    ("Q_PAGED_KV_NHD", paged((5, 20), (30, 20)), 1 << 40),
]


@pytest.mark.parametrize(("layout", "case", "size"), CHUNKS, ids=[f"{c[0]}-{c[2]}" for c in CHUNKS])
def test_fmha_v2_of_chunks(executor: Executor, layout: str, case: BatchCase, size: int) -> None:
    """A token sees the keys of its own chunk up to itself: the same as a custom mask in fp64."""
    inputs, arguments = fmha_v2_arguments(case, layout, executor.device)
    arguments |= {"mask_mode": "chunked", "chunked_attention_size": size}
    for i, request in enumerate(inputs.requests):
        qo_len, kv_len = len(request.q), len(request.k)
        position = torch.arange(qo_len)[:, None] + kv_len - qo_len
        key = torch.arange(kv_len)
        inputs.requests[i] = dataclasses.replace(request, keep=(key <= position) & (key // size == position // size))
    assert_right(case, inputs, trtllm_fmha_v2_prefill(**arguments, backend=executor.backend), None)


def test_fmha_v2_of_chunks_after_other_chunks() -> None:
    """Calls of equal lengths share plans only where they have the same chunks."""
    _, arguments = fmha_v2_arguments(paged((20,), (20,), mask="causal"), "Q_PAGED_KV_NHD", "cpu")
    sizes = (0, 4, 8, None, -1, 4)
    full, four, eight, *others = [trtllm_fmha_v2_prefill(**arguments, chunked_attention_size=n) for n in sizes]
    assert not any(torch.equal(four, other) for other in (eight, full))
    assert all(map(torch.equal, others, (full, full, four)))


def test_fmha_v2_with_values_of_the_same_pool_in_pages_of_their_own(device: str) -> None:
    """SGLang's call: the table counts pages of k and of v from the start of k."""
    case = paged((5, 20), (30, 20), mask="causal")
    inputs, arguments = fmha_v2_arguments(case, "Q_PAGED_KV_NHD", device)
    pool = torch.stack(list(inputs.kv[0]))
    k, v = pool
    table, pages = arguments["block_tables"], k.shape[0]
    arguments |= {"qkv": (inputs.q, (k, v)), "block_tables": torch.stack((table, table + pages), 1)}
    assert_right(case, inputs, trtllm_fmha_v2_prefill(**arguments), None)
    moved = arguments["block_tables"].clone()
    moved[0, 1, 0] += 1
    with pytest.raises(NotSupported, match="one page table for keys and values"):
        trtllm_fmha_v2_prefill(**arguments | {"block_tables": moved})


def test_forms_of_arguments_do_not_matter() -> None:
    _, arguments = context_arguments(CASE)
    expected, expected_lse = trtllm_batch_context_with_kv_cache(**arguments)
    k, v = arguments["kv_cache"]
    lse = torch.empty_like(expected_lse)
    for changes in (
        {"kv_cache": [k, v]},
        {"kv_cache": (k.transpose(1, 2), v.transpose(1, 2)), "kv_layout": "HND"},
        {"kv_cache": torch.stack((k, v), 1)},
        {"seq_lens": arguments["seq_lens"].to(torch.uint32)},
        {"cum_seq_lens_q": arguments["cum_seq_lens_q"].long()},
        {"out": torch.empty_like(expected), "lse": lse},
        {"out_dtype": "float16"},
        {"max_q_len": 1 << 20, "max_kv_len": 1 << 20},
        {"multi_ctas_kv_counter_buffer": torch.zeros(8, dtype=torch.uint8), "use_fp16_softmax": False},
        {"skip_softmax_threshold_scale_factor": 0.0, "backend": "auto", "enable_pdl": False},
        {"uses_shared_paged_kv_idx": False, "block_tables": arguments["block_tables"][:, None].expand(-1, 2, -1)},
        {"cum_seq_lens_kv": torch.tensor([0, 3, 4, 6, 7], dtype=torch.int32)},  # vLLM's: sums of pages
    ):
        out, found = trtllm_batch_context_with_kv_cache(**arguments | changes)
        assert torch.equal(out, expected), changes
        assert torch.equal(found, expected_lse), changes
    assert torch.equal(lse, expected_lse)


def test_rows_of_no_request() -> None:
    """Rows past the last request are 0 in a new out, and stay in a given one."""
    _, arguments = context_arguments(CASE)
    expected, expected_lse = trtllm_batch_context_with_kv_cache(**arguments)
    padded = {**arguments, "query": torch.cat((arguments["query"], torch.full((2, 2, 64), math.nan).half()))}
    out, lse = trtllm_batch_context_with_kv_cache(**padded)
    assert torch.equal(out[:-2], expected)
    assert torch.equal(lse[:-2], expected_lse)
    assert not out[-2:].any()
    assert (lse[-2:] == -math.inf).all()
    given = torch.full_like(out, 7.0)
    assert trtllm_batch_context_with_kv_cache(**padded, out=given)[0] is given
    assert torch.equal(given[:-2], expected)
    assert (given[-2:] == 7).all()


def test_layers_share_a_plan_and_see_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with the same lengths plans nothing, also with other scales, and reads the pages of its own table."""
    plans = []
    plan = planned_prefill.Session._plan
    monkeypatch.setattr(planned_prefill.Session, "_plan", lambda self, n: (plans.append(n), plan(self, n)))
    inputs, arguments = context_arguments(CASE)
    trtllm_batch_context_with_kv_cache(**arguments)
    assert len(plans) == 1
    table = arguments["block_tables"]
    order = torch.randperm(arguments["kv_cache"][0].shape[0], generator=torch.Generator().manual_seed(0))
    moved = tuple(x[order.argsort()] for x in arguments["kv_cache"])  # page p is now page order[p]
    live = table < len(order)
    table[live] = order[table[live].long()].int()
    out, lse = trtllm_batch_context_with_kv_cache(**arguments | {"kv_cache": moved})
    assert_right(CASE, inputs, out, lse)
    trtllm_batch_context_with_kv_cache(**arguments | {"kv_cache": moved, "bmm1_scale": 0.5})
    assert len(plans) == 1
    trtllm_batch_context_with_kv_cache(**arguments | {"kv_cache": moved, "window_left": 4})
    assert len(plans) == 2
    shorter = arguments["seq_lens"].clone()
    shorter[0] -= 1
    trtllm_batch_context_with_kv_cache(**arguments | {"kv_cache": moved, "seq_lens": shorter})
    assert len(plans) == 3


def test_equal_calls_are_checked_once(driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are read in every call: others need another plan, and so do these afterwards."""
    checked = noted(monkeypatch, planned_prefill.unplanned, "lengths")
    _, arguments = context_arguments(CASE)
    for shorter in (0, 1, 0):
        before = len(checked)
        given = {**arguments, "seq_lens": arguments["seq_lens"] - shorter}
        launches = [trtllm_batch_context_with_kv_cache(**given) and len(driver.recorded) for _ in range(3)]
        assert len(checked) == before + 1
        assert launches[2] - launches[1] == launches[1] - launches[0] > 0
    with pytest.raises(ArgumentError, match="out must not share memory with query"):
        trtllm_batch_context_with_kv_cache(**arguments, out=arguments["query"])
    with pytest.raises(ArgumentError, match="max_kv_len"):
        trtllm_batch_context_with_kv_cache(**{**arguments, "max_kv_len": 1})


@pytest.mark.parametrize("rows", [3, 5])
def test_tables_are_checked_under_a_plan_in_force(rows: int) -> None:
    """A call whose lengths are those of the call before still has a row of block_tables per request."""
    _, arguments = context_arguments(CASE)
    trtllm_batch_context_with_kv_cache(**arguments)
    table = arguments["block_tables"]
    other = torch.cat((table, table))[:rows]
    with pytest.raises(ArgumentError, match="block_tables must have 4 rows"):
        trtllm_batch_context_with_kv_cache(**arguments | {"block_tables": other})


def test_what_is_kept_is_bounded() -> None:
    """Sessions of an earlier workspace are dropped, and so are old ones of the same."""
    inputs, arguments = context_arguments(CASE)
    for window in range(3 * planned_prefill.MAX_STRUCTURES):
        trtllm_batch_context_with_kv_cache(**arguments | {"window_left": window})
    (place,) = (place for key, place in planned_prefill._places.items() if key[0] == inputs.q.device)
    assert len(place.sessions) == planned_prefill.MAX_STRUCTURES
    trtllm_batch_context_with_kv_cache(**arguments | {"workspace_buffer": workspace("cpu")})
    assert len(place.sessions) == 1


def deepseek_arguments(case: BatchCase, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """A case and the keywords of `trtllm_ragged_attention_deepseek`."""
    inputs, arguments = fmha_v2_arguments(case, "SEPARATE_Q_K_V", device)
    for name in ("input_layout", "mask_mode"):
        del arguments[name]
    arguments |= dict(zip(("query", "key", "value"), arguments.pop("qkv"), strict=True))
    if "sinks" in arguments:
        arguments["attention_sinks"] = arguments.pop("sinks")
    arguments |= {"window_left": case.window_left, "is_causal": case.mask == "causal", "return_lse": case.return_lse}
    return inputs, arguments | {"o_sf_scale": 1.0, "enable_pdl": None}


MLA = {"num_qo_heads": 2, "num_kv_heads": 2, "head_dim_qk": 192, "head_dim_vo": 128, "return_lse": True}
DEEPSEEK = {
    "new tokens": ragged((5, 1, 20), (5, 1, 20), mask="causal", **MLA),
    "chunk of the context": ragged((5, 1, 20), (30, 0, 7), **MLA),
    "requests without tokens": ragged((5, 0, 9), (30, 4, 9), mask="causal", **MLA),
    "sinks": ragged((5, 2), (30, 2), mask="causal", sinks=True, **MLA),
    "window": ragged((5, 2), (30, 2), mask="causal", window_left=7),
    "tensors": ragged((5, 2), (30, 2), mask="causal", tensor_scales=True, sm_scale=0.3, v_scale=1.5, **MLA),
}


FUNCTIONS = {
    "context": (trtllm_batch_context_with_kv_cache, context_arguments, CONTEXT),
    "deepseek": (trtllm_ragged_attention_deepseek, deepseek_arguments, DEEPSEEK),
}
CALLS = [(function, name) for function, (*_, cases) in FUNCTIONS.items() for name in cases]


@pytest.mark.parametrize(("function", "name"), CALLS)
def test_numbers(executor: Executor, function: str, name: str) -> None:
    called, arguments_of, cases = FUNCTIONS[function]
    inputs, arguments = arguments_of(cases[name], executor.device)
    result = called(**arguments, backend=executor.backend)
    assert_right(cases[name], inputs, *(result if cases[name].return_lse else (result, None)))


def test_deepseek_with_lengths_on_the_host() -> None:
    """Then nothing else says lengths: the other arrays are not read."""
    case = DEEPSEEK["chunk of the context"]
    inputs, arguments = deepseek_arguments(case)
    expected = trtllm_ragged_attention_deepseek(**arguments)
    arguments |= {"q_seq_lens_cpu": torch.tensor(case.qo_lens), "kv_seq_lens_cpu": torch.tensor(case.kv_lens)}
    arguments |= {name: torch.empty(0) for name in ("seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv")}
    out, lse = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    found = trtllm_ragged_attention_deepseek(**arguments, out=out, lse=lse)
    assert found[0] is out
    assert found[1] is lse
    assert_right(case, inputs, *found)
    assert all(map(torch.equal, found, expected))
