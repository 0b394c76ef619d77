"""Every bad argument of a batch raises before anything runs: a type that callers can catch, a message that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import cute_attn
from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    LayoutError,
    NotPlannedError,
    NotSupported,
    RuntimeArgumentError,
    fast_decode_plan,
)
from cute_attn.request import operands
from tests.support.error_rows import Row, ints, overlapping, with_grad, workspace, zeros
from tests.support.multi_item_errors import MULTI_ITEM

FLOAT, E4M3 = torch.float32, torch.float8_e4m3fn


class Setting(NamedTuple):
    """A good call of one wrapper."""

    wrapper: Callable[..., Any]
    plan: dict[str, Any]
    run: dict[str, Any]


def paged() -> Setting:
    plan = {
        "qo_indptr": ints(0, 3, 3, 5),
        "paged_kv_indptr": ints(0, 2, 2, 3),
        "paged_kv_indices": ints(4, 0, 2),
        "paged_kv_last_page_len": ints(3, 0, 4),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 16,
        "page_size": 4,
    }
    return Setting(
        BatchPrefillWithPagedKVCacheWrapper, plan, {"q": zeros(5, 4, 16), "paged_kv_cache": zeros(5, 2, 4, 2, 16)}
    )


def ragged() -> Setting:
    plan = {"qo_indptr": ints(0, 3, 3, 5), "kv_indptr": ints(0, 7, 7, 11)}
    plan |= {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16}
    run = {"q": zeros(5, 4, 16), "k": zeros(11, 2, 16), "v": zeros(11, 2, 16)}
    return Setting(BatchPrefillWithRaggedKVCacheWrapper, plan, run)


def decode() -> Setting:
    plan = {"indptr": ints(0, 2, 2, 3), "indices": ints(4, 0, 2), "last_page_len": ints(3, 0, 4)}
    plan |= {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    run = {"q": zeros(3, 4, 16), "paged_kv_cache": zeros(5, 2, 4, 2, 16)}
    return Setting(BatchDecodeWithPagedKVCacheWrapper, plan, run)


SETTINGS = {"paged": paged, "ragged": ragged, "decode": decode}


def cache(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return zeros(*(shape or (5, 2, 4, 2, 16)), dtype=dtype)


# ---- constructors

MAKE = [
    Row("workspace no tensor", {"float_workspace_buffer": 128}, ArgumentTypeError, ("float_workspace_buffer", "128")),
    Row(
        "workspace misaligned",
        {"float_workspace_buffer": workspace()[1:]},
        ArgumentError,
        ("float_workspace_buffer must start at a multiple of 16", "% 16 = "),
    ),
    Row(
        "workspace strided",
        {"float_workspace_buffer": workspace()[::2]},
        ArgumentError,
        ("float_workspace_buffer must be contiguous", "(2,)"),
    ),
    Row(
        "workspace device",
        {"float_workspace_buffer": workspace().to("meta")},
        ArgumentError,
        ("float_workspace_buffer must be on a cpu or cuda device", "meta"),
    ),
    Row("layout", {"kv_layout": "NDH"}, LayoutError, ("kv_layout", "'NHD', 'HND'", "'NDH'")),
    Row("graph no bool", {"use_cuda_graph": 1}, ArgumentTypeError, ("use_cuda_graph must be True or False",)),
    Row(
        "backend",
        {"backend": "fa9"},
        LayoutError,
        ("one of 'auto', 'fa4', 'fa3', 'xqa', 'fa2', 'reference'", "'fa9'"),
    ),
    Row("backend elsewhere", {"backend": "trtllm-gen"}, NotSupported, ("trtllm-gen refuses", 'backend="auto"')),
    Row("jit", {"jit_args": ["x"]}, NotSupported, ("jit_args", "CUDA", "sinks")),
]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("row", MAKE, ids=lambda row: row.name)
def test_constructor(kind: str, row: Row) -> None:
    arguments = {"float_workspace_buffer": workspace(), **row.arguments}
    raises(row, lambda: SETTINGS[kind]().wrapper(**arguments))


UNUSED = {
    "paged": ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "custom_mask_buf", "mask_indptr_buf"),
    "ragged": ("qo_indptr_buf", "kv_indptr_buf", "custom_mask_buf"),
    "decode": ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in UNUSED.items() for name in names])
def test_buffers_without_a_graph(kind: str, name: str) -> None:
    """Buffers are not used without a graph; what is no buffer may be another argument, passed by position."""
    make = SETTINGS[kind]().wrapper
    make(workspace(), **{name: ints(0)})
    with pytest.raises(ArgumentTypeError, match=f"^{name} must be a torch.Tensor, got 'fa2'"):
        make(workspace(), **{name: "fa2"})


def raises(row: Row, function: Callable[[], Any]) -> None:
    with pytest.raises(row.error) as error:
        function()
    assert type(error.value) is row.error or row.error is ArgumentError
    for part in row.message:
        assert part in str(error.value)


GRAPH: list[tuple[str, Row]] = [
    ("paged", Row("no buffer", {}, ArgumentError, ("qo_indptr_buf must be a torch.Tensor with use_cuda_graph=True",))),
    ("ragged", Row("no buffer", {}, ArgumentError, ("qo_indptr_buf must be a torch.Tensor",))),
    ("decode", Row("no buffer", {}, ArgumentError, ("paged_kv_last_page_len_buffer must be a torch.Tensor",))),
    (
        "ragged",
        Row(
            "sizes",
            {"qo_indptr_buf": ints(0, 0, 0), "kv_indptr_buf": ints(0, 0)},
            ArgumentError,
            ("kv_indptr_buf must have 3 elements for batch size 2, got 2",),
        ),
    ),
    (
        "ragged",
        Row(
            "dtype",
            {"qo_indptr_buf": ints(0, 0), "kv_indptr_buf": ints(0, 0, dtype=torch.int64)},
            ArgumentError,
            ("kv_indptr_buf must have dtype int32", "int64"),
        ),
    ),
    (
        "ragged",
        Row(
            "strided",
            {"qo_indptr_buf": ints(0, 0), "kv_indptr_buf": ints(0, 0, 0, 0)[::2]},
            ArgumentError,
            ("kv_indptr_buf must be contiguous",),
        ),
    ),
    (
        "ragged",
        Row(
            "device",
            {"qo_indptr_buf": ints(0, 0), "kv_indptr_buf": ints(0, 0).to("meta")},
            ArgumentError,
            ("kv_indptr_buf must be on the workspace's device cpu", "meta"),
        ),
    ),
    (
        "ragged",
        Row(
            "one mask buffer",
            {"qo_indptr_buf": ints(0, 0), "kv_indptr_buf": ints(0, 0), "custom_mask_buf": workspace(8)},
            ArgumentError,
            ("mask_indptr_buf must be a torch.Tensor",),
        ),
    ),
    (
        "ragged",
        Row(
            "mask bounds",
            {
                "qo_indptr_buf": ints(0, 0),
                "kv_indptr_buf": ints(0, 0),
                "custom_mask_buf": workspace(8),
                "mask_indptr_buf": ints(0),
            },
            ArgumentError,
            ("mask_indptr_buf must have 2 elements",),
        ),
    ),
]


@pytest.mark.parametrize(("kind", "row"), GRAPH, ids=[f"{kind}-{row.name}" for kind, row in GRAPH])
def test_graph_constructor(kind: str, row: Row) -> None:
    raises(row, lambda: SETTINGS[kind]().wrapper(workspace(), use_cuda_graph=True, **row.arguments))


# ---- plan

PLAN = [  # of all wrappers
    Row("heads no multiple", {"num_kv_heads": 3}, RuntimeArgumentError, ("multiple of num_kv_heads", "4 and 3")),
    Row("no heads", {"num_qo_heads": 0}, ArgumentError, ("num_qo_heads must be at least 1, got 0",)),
    Row("heads float", {"num_qo_heads": 4.0}, ArgumentTypeError, ("num_qo_heads must be an int", "4.0")),
    Row("heads None", {"num_kv_heads": None}, ArgumentTypeError, ("num_kv_heads must be an int", "None")),
    Row("q fp32", {"q_data_type": FLOAT}, ArgumentError, ("q_data_type must be float16 or bfloat16", "float32")),
    Row("q name", {"q_data_type": "half_float"}, ArgumentError, ("q_data_type must name a dtype", "'half_float'")),
    Row("q no dtype", {"q_data_type": "Tensor"}, ArgumentError, ("q_data_type must name a dtype", "'Tensor'")),
    Row("q number", {"q_data_type": 16}, ArgumentTypeError, ("q_data_type must be a torch.dtype or its name", "16")),
    Row(
        "kv other 16 bits",
        {"kv_data_type": "bfloat16"},
        ArgumentError,
        ("kv_data_type must be float16", "got bfloat16"),
    ),
    Row("kv int8", {"kv_data_type": torch.int8}, ArgumentError, ("kv_data_type must be", "int8")),
    Row("out int8", {"o_data_type": torch.int8}, ArgumentError, ("o_data_type must be", "int8")),
    Row("pos", {"pos_encoding_mode": "ROPE"}, LayoutError, ("pos_encoding_mode", "'ROPE_LLAMA'", "'ROPE'")),
    Row("window float", {"window_left": 3.0}, ArgumentTypeError, ("window_left must be an int", "3.0")),
    Row("sm_scale NaN", {"sm_scale": float("nan")}, ArgumentError, ("sm_scale must be finite",)),
    Row("soft cap", {"logits_soft_cap": "30"}, ArgumentTypeError, ("logits_soft_cap must be a number", "'30'")),
    Row("rope theta", {"rope_theta": 0}, ArgumentError, ("rope_theta must be > 0",)),
    Row("lse base", {"lse_base": "e"}, LayoutError, ("lse_base must be one of 'log2', 'ln'", "'e'")),
    Row("non_blocking", {"non_blocking": None}, ArgumentTypeError, ("non_blocking must be True or False",)),
    Row("split 0", {"fixed_split_size": 0}, ArgumentError, ("fixed_split_size must be at least 1, got 0",)),
    Row("split float", {"fixed_split_size": 2.0}, ArgumentTypeError, ("fixed_split_size must be an int",)),
    Row("no split", {"disable_split_kv": 1}, ArgumentTypeError, ("disable_split_kv must be True or False",)),
    Row("split -2", {"fixed_split_size": -2}, ArgumentError, ("fixed_split_size must be at least 1, got -2",)),
    Row(
        "split 0, no splits",
        {"fixed_split_size": 0, "disable_split_kv": True},
        ArgumentError,
        ("fixed_split_size must be at least 1, got 0",),
    ),
    Row("a long list", {"sm_scale": list(range(10**6))}, ArgumentTypeError, ("[0, 1, 2, 3, ...] (list)",)),
    Row("a large int", {"sm_scale": 10**5000}, ArgumentError, ("sm_scale must be finite",)),
    Row(
        "seq_lens",
        {"seq_lens": ints(7, 0, 5)},
        ArgumentError,
        ("seq_lens[2] must be 4, as the index arrays say; got 5",),
    ),
    Row(
        "unknown argument",
        {"head_dimension": 3},
        TypeError,
        ("head_dimension",),
    ),
]

PAGED = [  # of both wrappers with pages; names of index arrays are the decode wrapper's
    Row("page size 0", {"page_size": 0}, ArgumentError, ("page_size must be at least 1, got 0",)),
    Row("page size", {"page_size": 1 << 31}, ArgumentError, ("page_size must be at most 2147483647, got 2147483648",)),
    Row("page size float", {"page_size": 4.0}, ArgumentTypeError, ("page_size must be an int",)),
    Row("block tables", {"block_tables": [[0]]}, ArgumentTypeError, ("block_tables must be a torch.Tensor",)),
    Row("indptr list", {"indptr": [0, 2]}, ArgumentTypeError, ("indptr must be a torch.Tensor", "[0, 2]")),
    Row("indptr float", {"indptr": zeros(4)}, ArgumentError, ("indptr must have dtype int32 or int64", "float16")),
    Row("indptr rank", {"indptr": ints(0, 2, 2, 3)[None]}, ArgumentError, ("indptr must have 1 dimension", "(1, 4)")),
    Row(
        "indptr falls",
        {"indptr": ints(0, 2, 1, 3)},
        RuntimeArgumentError,
        ("must not decrease", "got 1 after 2", "request 1"),
    ),
    Row("indptr negative", {"indptr": ints(-1, 2, 2, 3)}, ArgumentError, ("must stay within 0..", "-1..3")),
    Row("last too long", {"last_page_len": ints(3, 0, 5)}, ArgumentError, ("must be within 1..4", "request 2 has 5")),
    Row("last 0", {"last_page_len": ints(0, 0, 4)}, ArgumentError, ("must be within 1..4", "request 0 has 0")),
    Row("last short", {"last_page_len": ints(3, 4)}, ArgumentError, ("must have shape [batch_size] = (3,)", "got 2")),
    Row("indices short", {"indices": ints(4, 0)}, ArgumentError, ("must have the 3 entries", "got 2")),
    Row("indices dtype", {"indices": zeros(3)}, ArgumentError, ("must have dtype int32 or int64", "float16")),
    Row("indices rank", {"indices": ints(4, 0, 2)[None]}, ArgumentError, ("must have 1 dimension", "(1, 3)")),
    Row("indices device", {"indices": ints(4, 0, 2).to("meta")}, ArgumentError, ("must be on a cpu or cuda", "meta")),
    Row("NVFP4 head dim", {"kv_data_type": "uint8", "head_dim": 24}, ArgumentError, ("multiples of 16", "24")),
    Row("NVFP4 odd", {"kv_data_type": "uint8", "head_dim": 15}, ArgumentError, ("even head dimensions", "15")),
]

PREFILL = [  # of both prefill wrappers
    Row("causal", {"causal": 1}, ArgumentTypeError, ("causal must be True or False",)),
    Row("qo numpy", {"qo_indptr": np.arange(4)}, ArgumentTypeError, ("qo_indptr must be a torch.Tensor", "ndarray")),
    Row("fp16 reduction", {"use_fp16_qk_reduction": 1}, ArgumentTypeError, ("use_fp16_qk_reduction must be",)),
    Row(
        "qo falls", {"qo_indptr": ints(0, 3, 2, 5)}, RuntimeArgumentError, ("qo_indptr must not decrease", "request 1")
    ),
    Row("qo short", {"qo_indptr": ints(0, 5)}, ArgumentError, ("must both have batch_size + 1", "2 and 4")),
    Row("qo empty", {"qo_indptr": ints()}, ArgumentError, ("qo_indptr must have shape [batch_size + 1]",)),
    Row(
        "mask size", {"custom_mask": torch.ones(28, dtype=torch.bool)}, ArgumentError, ("custom_mask", "= 29", "got 28")
    ),
    Row("mask dtype", {"custom_mask": ints(*range(29))}, ArgumentError, ("must be a 1-D bool or uint8", "int32")),
    Row("mask rank", {"custom_mask": torch.ones(1, 29, dtype=torch.bool)}, ArgumentError, ("1-D bool", "(1, 29)")),
    Row(
        "packed size",
        {"packed_custom_mask": workspace(5)},
        ArgumentError,
        ("packed_custom_mask must have 4 bytes", "segment_packbits", "got 5"),
    ),
    Row("packed dtype", {"packed_custom_mask": ints(1)}, ArgumentError, ("1-D uint8 tensor", "int32")),
    *MULTI_ITEM,
    Row(
        "seq_lens_q",
        {"seq_lens_q": ints(3, 1, 2)},
        ArgumentError,
        ("seq_lens_q[1] must be 0, as the index arrays say; got 1",),
    ),
    Row("longest q", {"max_token_per_sequence": 2}, ArgumentError, ("max_token_per_sequence", "has 3; got 2")),
    Row("longest kv", {"max_sequence_kv": 6}, ArgumentError, ("max_sequence_kv", "has 7; got 6")),
    Row("head dim", {"head_dim_qk": 0}, ArgumentError, ("head_dim_qk must be at least 1",)),
    Row("head dim vo", {"head_dim_vo": -3}, ArgumentError, ("head_dim_vo must be at least 1, got -3",)),
    Row("rope odd", {"head_dim_qk": 15, "pos_encoding_mode": "ROPE_LLAMA"}, ArgumentError, ("even head dim", "15")),
    Row("both head dims", {"head_dim": 16}, ArgumentTypeError, ("head_dim and head_dim_qk are two names",)),
]

RAGGED = [
    Row("kv falls", {"kv_indptr": ints(0, 7, 6, 11)}, RuntimeArgumentError, ("kv_indptr must not decrease",)),
    Row(
        "kv too long",
        {"kv_indptr": ints(0, 0, 0, 1 << 31, dtype=torch.int64)},
        ArgumentError,
        ("kv_indptr must stay within",),
    ),
    Row("v_indptr", {"v_indptr": ints(0)}, NotSupported, ("v_indptr", "v is indexed like k")),
    Row("o_indptr", {"o_indptr": ints(0)}, NotSupported, ("o_indptr",)),
]

DECODE = [
    Row("q_len 0", {"q_len_per_req": 0}, ArgumentError, ("q_len_per_req must be at least 1, got 0",)),
    Row("q_len", {"q_len_per_req": 10**30}, ArgumentError, ("q_len_per_req must be at most",)),
    Row("window right", {"window_right": 3}, NotSupported, ("window_right", "causal=False")),
    Row("window right float", {"window_right": 0.0}, ArgumentTypeError, ("window_right must be an int",)),
]

TODAY = {"indptr": "paged_kv_indptr", "indices": "paged_kv_indices", "last_page_len": "paged_kv_last_page_len"}


def plan_rows() -> list[tuple[str, Row]]:
    rows = [(kind, row) for kind in SETTINGS for row in PLAN]
    rows += [("decode", row) for row in (*PAGED, *DECODE)]
    renamed = {**TODAY, "head_dim": "head_dim_qk"}
    for row in PAGED:
        arguments = {renamed.get(name, name): value for name, value in row.arguments.items()}
        rows.append(("paged", row._replace(arguments=arguments)))
    rows += [(kind, row) for kind in ("paged", "ragged") for row in PREFILL]
    return rows + [("ragged", row) for row in RAGGED]


@pytest.mark.parametrize(("kind", "row"), plan_rows(), ids=[f"{kind}-{row.name}" for kind, row in plan_rows()])
def test_plan(kind: str, row: Row) -> None:
    """An error leaves the previous plan in force."""
    setting = SETTINGS[kind]()
    made = setting.wrapper(workspace())
    made.plan(**setting.plan)
    before = made.run(**setting.run)
    raises(row, lambda: made.plan(**{**setting.plan, **row.arguments}))
    assert torch.equal(made.run(**setting.run), before)


# ---- run

RUN = [  # of all wrappers
    Row("q no tensor", {"q": [1.0]}, ArgumentTypeError, ("q must be a torch.Tensor", "[1.0]")),
    Row("q rows", {"q": zeros(2, 4, 16)}, ArgumentError, ("q must have the planned", "rows", "(2, 4, 16)")),
    Row("q 0-d", {"q": torch.zeros(())}, ArgumentError, ("q must have the planned",)),
    Row(
        "q dtype",
        {"q": "bfloat16"},
        ArgumentError,
        ("q must have the planned dtype float16", "q_data_type", "bfloat16"),
    ),
    Row("q device", {"q": "meta"}, ArgumentError, ("q must be on the workspace's device cpu", "meta")),
    Row("q heads", {"q": "heads"}, ArgumentError, ("q must have shape [rows, num_qo_heads, head_dim_qk]",)),
    Row("q grad", {"q": "grad"}, ArgumentError, ("q requires grad", "q.detach()")),
    Row("out dtype", {"out": "float32"}, ArgumentError, ("out must have dtype float16, got float32",)),
    Row("out shape", {"out": zeros(1, 4, 16)}, ArgumentError, ("out must have shape [rows, num_qo_heads,",)),
    Row("out overlaps itself", {"out": "overlapping"}, ArgumentError, ("out must not overlap itself",)),
    Row("out no tensor", {"out": [1.0]}, ArgumentTypeError, ("out must be a torch.Tensor", "[1.0]")),
    Row("lse no tensor", {"lse": [1.0]}, ArgumentTypeError, ("lse must be a torch.Tensor", "[1.0]")),
    Row("lse shape", {"lse": zeros(9, 4, dtype=FLOAT)}, ArgumentError, ("lse must have shape [rows, num_qo_heads]",)),
    Row("lse dtype", {"lse": zeros(5, 4)}, ArgumentError, ("lse must have",)),
    Row("return_lse", {"return_lse": 1}, ArgumentTypeError, ("return_lse must be True or False", "1 (int)")),
    Row("enable_pdl", {"enable_pdl": 1}, ArgumentTypeError, ("enable_pdl must be True or False",)),
    Row("k_scale word", {"k_scale": "1"}, ArgumentTypeError, ("k_scale must be a number", "'1'")),
    Row("q_scale NaN", {"q_scale": float("nan")}, ArgumentError, ("q_scale must be finite",)),
    Row("v_scale bool", {"v_scale": True}, ArgumentTypeError, ("v_scale must be a number", "True")),
    Row("k_scale vector", {"k_scale": zeros(2, dtype=FLOAT)}, ArgumentTypeError, ("k_scale", "one element", "(2,)")),
    Row("sinks shape", {"sinks": zeros(3, dtype=FLOAT)}, ArgumentError, ("sinks must have shape [num_qo_heads]",)),
    Row("sinks int", {"sinks": ints(1, 2, 3, 4)}, ArgumentError, ("sinks must have a floating-point dtype",)),
    Row("scales without NVFP4", {"kv_cache_sf": (1, 2)}, ArgumentError, ("kv_cache_sf", "uint8 (NVFP4)", "float16")),
]

RUN_PAGED = [
    Row("cache no tensor", {"paged_kv_cache": 3}, ArgumentTypeError, ("paged_kv_cache must be a tensor or a pair",)),
    Row("cache of 3", {"paged_kv_cache": (cache(), cache(), cache())}, ArgumentTypeError, ("a pair (k, v)",)),
    Row("cache of words", {"paged_kv_cache": (cache(), "v")}, ArgumentTypeError, ("v of paged_kv_cache", "'v'")),
    Row("cache rank", {"paged_kv_cache": cache(5, 4, 2, 16)}, ArgumentError, ("[num_pages, 2, ...]",)),
    Row("cache halves", {"paged_kv_cache": cache(5, 3, 4, 2, 16)}, ArgumentError, ("[num_pages, 2,",)),
    Row(
        "cache page size",
        {"paged_kv_cache": cache(5, 2, 3, 2, 16)},
        ArgumentError,
        ("[any, 4, 2, 16]", "(5, 3, 2, 16)"),
    ),
    Row("cache heads", {"paged_kv_cache": cache(5, 2, 4, 3, 16)}, ArgumentError, ("[any, 4, 2, 16]",)),
    Row("cache head dim", {"paged_kv_cache": cache(5, 2, 4, 2, 8)}, ArgumentError, ("[any, 4, 2, 16]",)),
    Row(
        "cache dtype", {"paged_kv_cache": cache().bfloat16()}, ArgumentError, ("k must have the planned dtype float16",)
    ),
    Row(
        "v dtype",
        {"paged_kv_cache": (cache(5, 4, 2, 16), cache(5, 4, 2, 16).bfloat16())},
        ArgumentError,
        ("v must have the planned dtype float16", "bfloat16"),
    ),
    Row(
        "cache device", {"paged_kv_cache": cache().to("meta")}, ArgumentError, ("k must be on the workspace's device",)
    ),
    Row(
        "cache last stride",
        {"paged_kv_cache": cache(5, 2, 4, 2, 32)[..., ::2]},
        ArgumentError,
        ("k must have stride 1 on its last axis", "k.contiguous()"),
    ),
    Row(
        "pages of v",
        {"paged_kv_cache": (cache(5, 4, 2, 16), cache(4, 4, 2, 16))},
        ArgumentError,
        ("k and v must agree in all axes but the last",),
    ),
    Row("few pages", {"paged_kv_cache": cache(4, 2, 4, 2, 16)}, ArgumentError, ("page 0 of request 0, is 4", "0..3")),
    Row("window", {"window_left": 3}, ArgumentError, ("window_left of run() must be None or the planned -1", "got 3")),
    Row("skip", {"skip_softmax_threshold_scale_factor": 0.5}, NotSupported, ("skip_softmax_threshold",)),
]

RUN_RAGGED = [
    Row("k rank", {"k": zeros(11, 16)}, ArgumentError, ("k must have shape [kv_indptr[-1], num_kv_heads, head_dim]",)),
    Row("k short", {"k": zeros(10, 2, 16)}, ArgumentError, ("[11 or more, 2, 16]", "(10, 2, 16)")),
    Row("v short", {"v": zeros(10, 2, 16)}, ArgumentError, ("v must have shape",)),
    Row("v longer", {"v": zeros(12, 2, 16)}, ArgumentError, ("k and v must agree",)),
    Row("k None", {"k": None}, ArgumentTypeError, ("k must be a torch.Tensor",)),
    Row("v grad", {"v": with_grad(11, 2, 16)}, ArgumentError, ("v requires grad",)),
    Row("o_scale 0", {"o_scale": 0.0}, ArgumentError, ("o_scale must be > 0",)),
]

RUN_PREFILL_PAGED = [
    Row("fp16 softmax", {"use_fp16_softmax": True}, NotSupported, ("use_fp16_softmax", "fp32")),
    Row("spcompress", {"uses_spcompress": True}, NotSupported, ("uses_spcompress",)),
]


def run_rows() -> list[tuple[str, Row]]:
    rows = [(kind, row) for kind in SETTINGS for row in RUN]
    rows += [(kind, row) for kind in ("paged", "decode") for row in RUN_PAGED]
    return rows + [("ragged", row) for row in RUN_RAGGED] + [("paged", row) for row in RUN_PREFILL_PAGED]


def special(q: torch.Tensor, value: Any) -> Any:
    """Arguments that depend on the wrapper's q."""
    made = {
        "bfloat16": q.bfloat16,
        "meta": lambda: q.to("meta"),
        "heads": lambda: torch.cat((q, q), 1),
        "grad": lambda: with_grad(*q.shape),
        "float32": q.float,
        "overlapping": lambda: overlapping(*q.shape),
    }
    return made[value]() if isinstance(value, str) and value in made else value


@pytest.mark.parametrize(("kind", "row"), run_rows(), ids=[f"{kind}-{row.name}" for kind, row in run_rows()])
def test_run(kind: str, row: Row) -> None:
    """The same error each time, and good runs before and after."""
    setting = SETTINGS[kind]()
    made = setting.wrapper(workspace())
    made.plan(**setting.plan)
    arguments = {**setting.run, **{name: special(setting.run["q"], value) for name, value in row.arguments.items()}}
    for _ in range(2):
        made.run(**setting.run)
        raises(row, lambda: made.run(**arguments))


def test_unaligned_caches_are_refused_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "KERNEL_DEVICES", ("cpu",))
    setting = paged()
    made = setting.wrapper(workspace())
    made.plan(**setting.plan)
    shifted = zeros(5 * 2 * 4 * 2 * 16 + 1)[1:].view(5, 2, 4, 2, 16)
    padded = zeros(5, 2, 4, 2, 17)[..., :16]
    for bad in (shifted, padded):
        with pytest.raises(ArgumentError, match="k must start at a multiple of 16 bytes"):
            made.run(setting.run["q"], bad)
    odd = torch.randn(5, 4, 17).half()[..., 1:]
    assert torch.equal(
        made.run(odd, setting.run["paged_kv_cache"]), made.run(odd.clone(), setting.run["paged_kv_cache"])
    )


NVFP4 = [
    ("missing", None, ArgumentError, "kv_cache_sf"),
    ("one", (zeros(5, 4, 2, 1, dtype=E4M3),), ArgumentTypeError, "kv_cache_sf must be a tensor or a pair"),
    ("shape", (zeros(5, 4, 2, 2, dtype=E4M3),) * 2, ArgumentError, "k_sf of kv_cache_sf must have shape"),
    ("dtype", (zeros(5, 4, 2, 1),) * 2, ArgumentError, "k_sf of kv_cache_sf must have dtype float8_e4m3fn or uint8"),
    ("device", (zeros(5, 4, 2, 1, dtype=E4M3).to("meta"),) * 2, ArgumentError, "k_sf of kv_cache_sf must be on"),
]


@pytest.mark.parametrize(("name", "scales", "error", "message"), NVFP4, ids=[row[0] for row in NVFP4])
def test_nvfp4(name: str, scales: Any, error: type[Exception], message: str) -> None:
    setting = paged()
    made = setting.wrapper(workspace())
    made.plan(**setting.plan, kv_data_type="uint8")
    good = cache(5, 2, 4, 2, 8, dtype=torch.uint8)
    made.run(setting.run["q"], good, kv_cache_sf=cache(5, 2, 4, 2, 1, dtype=torch.uint8))
    with pytest.raises(error, match=message):
        made.run(setting.run["q"], good, kv_cache_sf=scales)


@pytest.mark.parametrize("kind", SETTINGS)
def test_run_before_plan(kind: str) -> None:
    setting = SETTINGS[kind]()
    made = setting.wrapper(workspace())
    for error in (NotPlannedError, RuntimeError, AttributeError):
        with pytest.raises(error, match=r"plan\(\) must come before run\(\)"):
            made.run(**setting.run)
    made.plan(**setting.plan)
    made.run(**setting.run)
    made.reset_workspace_buffer(workspace(), workspace())
    with pytest.raises(NotPlannedError, match="again after reset_workspace_buffer"):
        made.run(**setting.run)


def test_reset_refuses_bad_buffers() -> None:
    setting = paged()
    made = setting.wrapper(workspace())
    made.plan(**setting.plan)
    for bad in (
        (3, workspace()),
        (workspace()[1:], workspace()),
        (workspace(), 3),
        (workspace(), workspace().to("meta")),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            made.reset_workspace_buffer(*bad)
    made.run(**setting.run)


def test_every_error_is_public() -> None:
    assert {"ArgumentError", "ArgumentTypeError", "NotPlannedError", "NotSupported"} <= set(cute_attn.__all__)


def test_fast_plan_refuses_other_wrappers() -> None:
    setting = paged()
    with pytest.raises(ArgumentTypeError, match="wrapper must be a BatchDecodeWithPagedKVCacheWrapper"):
        fast_decode_plan(setting.wrapper(workspace()), **decode().plan)
    made = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), ints(0, 0), ints(0), ints(0))
    with pytest.raises(ArgumentError, match="the batch size must stay 1"):
        fast_decode_plan(made, **decode().plan)
