"""Every bad argument of a wrapper raises before anything runs: an error that names it. The plan in force stays. Other
types than those of FlashInfer's keywords: `tests/api/test_flashinfer_keywords.py`; tensors of runs: `test_stored`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import BatchAttention, NotPlannedError
from cute_attn.errors import ArgumentError, ArgumentTypeError, LayoutError, NotSupported, RuntimeArgumentError
from cute_attn.request import batch_plan
from cute_attn.request.index_arrays import IndexArrays
from tests.support.entry_points import E4M3, ENTRIES, KEYS, Planned, ints, randn, zeros
from tests.support.refused_calls import Row, assert_refused, places, raises, same

HALF, MEMORY = torch.float16, zeros(1 << 16)
ALL = ("paged", "ragged", "decode")


def of_entries(table: dict[tuple[str, ...], list[Row]]) -> Any:
    """Parametrise by entry and row."""
    cases = [(name, row) for names, rows in table.items() for name in names for row in rows]
    ids = [f"{name}-{'-'.join(row[0]) or 'nothing'}" for name, row in cases]
    return pytest.mark.parametrize(("name", "row"), cases, ids=ids)


def begun(name: str, changes: dict[str, Any] | None = None, **tensors: Any) -> Planned:
    """A wrapper of an entry with its plan. `changes`: of the constructor."""
    call = ENTRIES[name].begin(ENTRIES[name].tensors | tensors, "auto", {"__init__": changes or {}})
    assert isinstance(call, Planned)
    return call


# ---- constructors

WORKSPACES: list[tuple[Any, str]] = [
    (128, "float_workspace_buffer.*128"),
    (MEMORY[1:], "float_workspace_buffer must start at a multiple of 16.*% 16 = "),
    (MEMORY[::2], r"float_workspace_buffer must be contiguous.*\(2,\)"),
    (MEMORY.to("meta"), "float_workspace_buffer must be on a cpu or cuda device.*meta"),
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("bad", "message"), WORKSPACES, ids=["type", "alignment", "stride", "device"])
def test_workspaces(bad: Any, message: str, name: str) -> None:
    """Of the constructor, and later ones."""
    call, error = begun(name), ArgumentError if isinstance(bad, torch.Tensor) else ArgumentTypeError
    with pytest.raises(error, match=message):
        begun(name, **{"the workspace": bad})
    with pytest.raises(error, match=message):
        call.made.reset_workspace_buffer(bad, MEMORY)
    call(ENTRIES[name].tensors)


@pytest.mark.parametrize("bad", [3, MEMORY.to("meta")], ids=["type", "device"])
def test_other_workspaces(bad: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="int_workspace_buffer must be"):
        begun("paged").made.reset_workspace_buffer(MEMORY, bad)


BUFFERS: dict[tuple[str, ...], list[Row]] = {  # those of the other wrappers: test_flashinfer_keywords
    ("ragged, CUDA graph, mask",): [
        ({"kv_indptr_buf": ints(0, 0)}, "kv_indptr_buf must have 3 elements for batch size 2, got 2"),
        ({"kv_indptr_buf": ints(0, 0, 0).long()}, "kv_indptr_buf must have dtype int32.*int64"),
        ({"kv_indptr_buf": ints(*range(6))[::2]}, "kv_indptr_buf must be contiguous"),
        ({"kv_indptr_buf": ints(0, 0, 0).to("meta")}, "must be on the workspace's device cpu.*meta"),
        ({"mask_indptr_buf": None}, "mask_indptr_buf must be a torch.Tensor"),
        ({"mask_indptr_buf": ints(0)}, "mask_indptr_buf must have 3 elements"),
    ],
}


@of_entries(BUFFERS)
def test_buffers_of_graphs(name: str, row: Row) -> None:
    with raises(row):
        begun(name, **row[0])


def variant(*changes: tuple[int, Any], uri: str = "batch_prefill_attention_sink_f16_swa_False_fa2") -> list[Any]:
    """FlashInfer's arguments of the variant with sinks, its CUDA source aside, but for some."""
    dtypes = HALF, HALF, HALF, torch.int32
    args: list[Any] = [uri, *dtypes, 64, 64, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", "struct"]
    for place, value in changes:
        args[place] = value
    return args


CONSTRUCTORS: dict[tuple[str, ...], list[Row]] = {
    ALL: [({"backend": "trtllm-gen"}, 'trtllm-gen refuses.*backend="auto"', NotSupported)],
    ("paged", "ragged"): [
        ({"jit_args": variant(uri="my_attention")}, "jit_args=.*: variants written in CUDA", NotSupported),
        ({"jit_args": variant((7, ["sink", "bias"]), (8, ["float", "half"]))}, "jit_args", NotSupported),
        ({"jit_args": variant()[:9]}, "jit_args", NotSupported),
        ({"jit_args": "batch_prefill_attention_sink"}, "jit_args", NotSupported),
        ({"jit_args": variant((7, 5))}, "jit_args", NotSupported),
        ({"jit_args": variant((3, torch.float32))}, "dtype_o of jit_args must be its dtype_q"),
        *(
            ({"jit_args": variant(), "jit_kwargs": given}, message, *error)
            for given, message, *error in (
                ({"variant_owns": 1}, "jit_kwargs must be a dict of use_sliding_window", ArgumentTypeError),
                ({"use_sliding_window": 1}, "use_sliding_window.* must be True or False", ArgumentTypeError),
                ({"pos_encoding_mode": 7}, "pos_encoding_mode.* must be at most 2, got 7"),
            )
        ),
    ],
    ("paged with sinks",): [({"head_dim_vo": 0}, "head_dim_vo must be at least 1")],
    ("mixed",): [({"device": b"?"}, r"\bdevice\b")],
}


@of_entries(CONSTRUCTORS)
def test_constructors(name: str, row: Row) -> None:
    with raises(row):
        begun(name, row[0])


# ---- plan

ITEMS: dict[str, Any] = {  # a good call: kv_len - prefix_len is 2 and 3
    "prefix_len_ptr": ints(2, 13),
    "token_pos_in_items_ptr": ints(0, 1, 0, 0, 0, 1, 2),
    "token_pos_in_items_len": 4,
    "max_item_len_ptr": ints(1, 2),
}
MULTI_ITEM: list[Row] = [
    ({"prefix_len_ptr": [2, 13]}, "prefix_len_ptr must be a torch.T", ArgumentTypeError),
    ({"prefix_len_ptr": zeros(2, dtype=HALF)}, "prefix_len_ptr must have.*float16"),
    ({"prefix_len_ptr": ints(2, 13)[None]}, "prefix_len_ptr.*1 dimension"),
    ({"prefix_len_ptr": ints(2)}, r"\[batch_size\] = \(2,\), got 1 elements"),
    ({"prefix_len_ptr": ints(2, -1)}, "must not be negative, got -1"),
    ({"prefix_len_ptr": ints(2, 13).to("meta")}, "prefix_len_ptr.*meta"),
    ({"max_item_len_ptr": ints(3)}, "max_item_len_ptr must have shape"),
    ({"max_item_len_ptr": ints(1, 1)}, "request 1 has 1.*token at 2"),
    ({"token_pos_in_items_len": 1}, "at least kv_len.*request 0 needs 2, got 1"),
    ({"token_pos_in_items_len": -1}, "must be at least 0, got -1"),
    ({"token_pos_in_items_ptr": ints(*range(5))}, "the 7 elements.*5"),
    (
        {"token_pos_in_items_ptr": ints(0, 2, 0, 0, 0, 1, 2)},
        r"must not grow by more than 1.*got 2 after 0 \(request 0, key 3\)",
    ),
    ({"custom_mask": torch.ones(92, dtype=torch.bool)}, "contradict"),
    ({"packed_custom_mask": zeros(12)}, "prefix_len_ptr contradict"),
]
PAGED: list[Row] = [  # names of index arrays are the decode wrapper's
    ({"page_size": 0}, "page_size must be at least 1, got 0"),
    ({"page_size": 1 << 31}, "page_size must be at most 2147483647, got 2147483648"),
    ({"page_size": 4.0}, "page_size must be an int", ArgumentTypeError),
    ({"indptr": [0, 2]}, r"indptr must be a torch.Tensor.*\[0, 2\]", ArgumentTypeError),
    ({"indptr": zeros(3, dtype=HALF)}, "indptr must have dtype int32 or int64.*float16"),
    ({"indptr": ints(0, 1, 2)[None]}, r"indptr must have shape \[n\].*\(1, 3\)"),
    ({"indptr": torch._neg_view(ints(0, -1, -2))}, r"indptr must not be a negative view"),
    ({"indptr": ints(0, 2, 1)}, "must not decrease.*got 1 after 2.*request 1", RuntimeArgumentError),
    ({"indptr": ints(-1, 1, 2)}, r"must stay within 0\.\..*-1\.\.2"),
    ({"last_page_len": ints(3, 17)}, r"must be within 1\.\.16.*request 1 has 17"),
    ({"last_page_len": ints(0, 16)}, r"must be within 1\.\.16.*request 0 has 0"),
    ({"last_page_len": ints(3)}, r"must have shape \[batch_size\] = \(2,\).*got 1"),
    ({"indices": ints(1)}, "must have the 2 entries.*got 1"),
    ({"indices": zeros(2, dtype=HALF)}, "must have dtype int32 or int64.*float16"),
    ({"indices": ints(0, 1).to_sparse()}, "indices must be a strided tensor"),
    ({"indices": ints(0, 1)[None]}, r"must have shape \[n\].*\(1, 2\)"),
    ({"indices": ints(0, 1).to("meta")}, "must be on a cpu or cuda.*meta"),
    ({"kv_data_type": "uint8", "head_dim": 24}, "multiples of 16.*24"),
    ({"kv_data_type": "uint8", "head_dim": 15}, "even head dimensions.*15"),
]
NAMES = {"head_dim": "head_dim_qk"} | {n: f"paged_kv_{n}" for n in ("indptr", "indices", "last_page_len")}
BLOCKS = ("blocks",)
PLANS: dict[tuple[str, ...], list[Row]] = {
    ALL: [
        ({"num_kv_heads": 3}, "multiple of num_kv_heads.*4 and 3", RuntimeArgumentError),
        *same("must be at least 1, got", num_qo_heads=0, fixed_split_size=0),
        *same("must be an int", ArgumentTypeError, num_qo_heads=4.0, num_kv_heads=None),
        ({"q_data_type": torch.float32}, "q_data_type must be float16 or bfloat16.*float32"),
        ({"q_data_type": "Tensor"}, "q_data_type must name a dtype.*'Tensor'"),
        ({"kv_data_type": torch.int8}, "kv_data_type must be.*int8"),
        ({"o_data_type": torch.int8}, "o_data_type must be.*int8"),
        ({"sm_scale": float("nan")}, "sm_scale must be finite"),
        ({"rope_theta": 0}, "rope_theta must be > 0"),
        ({"lse_base": "e"}, "lse_base must be one of 'log2', 'ln'.*'e'", LayoutError),
        ({"fixed_split_size": -2, "disable_split_kv": True}, "fixed_split_size must be at least 1, got -2"),
        ({"sm_scale": 10**5000}, "sm_scale must be finite"),
        ({"head_dimension": 3}, "head_dimension", TypeError),
    ],
    ("decode",): [
        *PAGED,
        ({"q_len_per_req": 0}, "q_len_per_req must be at least 1, got 0"),
        ({"q_len_per_req": 10**30}, "q_len_per_req must be at most"),
    ],
    ("paged",): [({NAMES.get(n, n): x for n, x in changes.items()}, *rest) for changes, *rest in PAGED],
    ("paged", "ragged"): [
        ({"qo_indptr": np.arange(3)}, "qo_indptr must be a torch.Tensor.*ndarray", ArgumentTypeError),
        ({"qo_indptr": ints(0, 3, 2)}, "qo_indptr must not decrease.*request 1", RuntimeArgumentError),
        ({"qo_indptr": ints(0, 5)}, r"must both have batch_size \+ 1.*2 and 3"),
        ({"qo_indptr": ints()}, r"qo_indptr must have shape \[batch_size \+ 1\]"),
        ({"custom_mask": torch.ones(91, dtype=torch.bool)}, "custom_mask.*= 92.*got 91"),
        ({"custom_mask": ints(*range(92))}, "custom_mask must have dtype bool or uint8.*int32"),
        ({"custom_mask": torch.ones(1, 92, dtype=torch.bool)}, r"custom_mask must have shape \[n\].*\(1, 92\)"),
        ({"packed_custom_mask": zeros(13)}, "packed_custom_mask must have 12 bytes.*segment_packbits.*got 13"),
        ({"packed_custom_mask": ints(1)}, "packed_custom_mask must have dtype uint8.*int32"),
        *((ITEMS | changes, *rest) for changes, *rest in MULTI_ITEM),
        *same("must be at least 1, got", head_dim_qk=0, head_dim_vo=-3),
        ({"head_dim_qk": 15, "pos_encoding_mode": "ROPE_LLAMA"}, "even head dim.*15"),
        ({"head_dim": 16}, "head_dim and head_dim_qk are two names", ArgumentTypeError),
    ],
    ("ragged",): [
        ({"kv_indptr": ints(0, 7, 6)}, "kv_indptr must not decrease", RuntimeArgumentError),
        ({"kv_indptr": torch.tensor([0, 0, 1 << 31])}, "kv_indptr must stay within"),
    ],
    ("paged with sinks",): [
        ({"q_data_type": HALF}, "q_data_type of plan.* made for, torch.bfloat16; got torch.float16"),
        ({"kv_data_type": E4M3}, "kv_data_type of plan"),
        ({"q_data_type": torch.zeros(2)}, "q_data_type of plan"),
        ({"head_dim_vo": 128}, "head_dim_vo of plan.* made for, 64; got 128"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode of plan.* 'NONE'; got 'ALIBI'"),
    ],
    ("mixed",): [
        ({"kv_len_arr": ints(4, 17)}, r"kv_len_arr must be within 0\.\.16, .*pages; request 1 has 17"),
        ({"kv_len_arr": ints(4, -1)}, r"kv_len_arr must be within 0\.\.16, .*; request 1 has -1"),
        ({"kv_len_arr": ints(4)}, r"kv_len_arr must have shape \[batch_size\]"),
        ({"kv_len_arr": torch.ones(2)}, "kv_len_arr must have dtype int32 or int64"),
        ({"kv_len_arr": ints(4, 16).to("meta")}, r"\bkv_len_arr\b.*meta"),
        ({"kv_len_arr": [4, 16]}, "kv_len_arr must be a torch.Tensor", ArgumentTypeError),
        ({"qo_indptr": ints(0, 8)}, "qo_indptr and kv_indptr must both have batch_size"),
        ({"num_qo_heads": 3}, "num_qo_heads"),
    ],
    BLOCKS: [
        ({"N": 33}, "N must be a multiple of C, got N=33 and C=16"),
        ({"M": 9}, r"indptr must have ceil\(M / R\) \+ 1 = 4 elements"),
        ({"R": 0}, "R must be at least 1, got 0"),
        ({"indices": ints(0, 0, 2)}, r"indices must be within 0..1 .*, got 0..2"),
        ({"indices": ints(0, -1, 1)}, r"indices must be within 0"),
        ({"indices": ints(0, 1)}, "indices must have the 3 entries that indptr counts, got 2"),
        ({"indices": None}, "indices must be a torch.Tensor", ArgumentTypeError),
        ({"indptr": ints(0, 2, 1)}, "indptr must not decrease"),
        ({"mask": torch.ones(3, 5, 16, dtype=torch.bool)}, r"mask must .* \[blocks, R, C\] = \[3, 4, 16\]"),
        ({"mask": torch.ones(3, 4, 16)}, "mask must be a bool tensor of shape"),
        ({"packed_mask": zeros(3)}, r"^packed_mask must have \d+ bytes.*segment_packbits.*got 3"),
        ({"k_scale": 0}, r"\bk_scale\b", NotSupported),
        ({"use_clc": False}, r"\buse_clc\b", NotSupported),
        ({"block_mask": torch.ones(1, 2)}, "refuses block_mask=a float32 .*Instead: indptr and indices", NotSupported),
    ],
    ("variable blocks, grouped",): [
        ({"block_mask_map": torch.ones(2, 2, 3)}, "block_mask_map must have shape"),
        ({"block_mask_map": torch.ones(2, 2, 2, device="meta")}, "block_mask_map.*meta"),
        ({"block_row_sz": ints(3, 5).repeat(2, 1).to("meta")}, "block_row_sz.*meta"),
        (
            {"block_row_sz": ints(3, 5, 4, 5).view(2, 2)},
            "block_row_sz must have the same sum for every kv head, got 8 and 9",
        ),
        ({"block_row_sz": ints(9, -1, 4, 4).view(2, 2)}, "block_row_sz must not be negative, got -1"),
        ({"block_col_sz": ints(16, 16)[None]}, r"block_col_sz must have shape .* = \[2, blocks\]"),
        ({"block_col_sz": torch.rand(2, 2)}, "block_col_sz must have dtype int32 or int64"),
        ({"num_qo_heads": 3}, "num_qo_heads must be a multiple of num_kv_heads, got 3 and 2"),
    ],
}


@of_entries(PLANS)
def test_plan(name: str, row: Row) -> None:
    """An error leaves the previous plan in force."""
    call, given = begun(name), ENTRIES[name].tensors
    call(given)
    before = given["out"].clone()
    with raises(row):
        call.made.plan(**call.planned | row[0])
    given["out"].zero_()
    call(given)
    assert torch.equal(given["out"], before)


def test_lengths_that_are_given_again_have_types_where_they_are_not_compared() -> None:
    """Beside index arrays on a GPU."""
    unread = IndexArrays(("qo_indptr", "kv_indptr"), ints(0, 2), ints(0, 5)).on_device(torch.device("cpu"))
    other = {"seq_lens": ints(9), "seq_lens_q": ints(9), "max_token_per_sequence": 0, "max_sequence_kv": 0}
    batch_plan.repeated_lengths(unread, **other)
    tensors = same("must be a torch.Tensor", ArgumentTypeError, seq_lens=[[5]], seq_lens_q="x")
    for row in (*tensors, *same("must be an int", ArgumentTypeError, max_token_per_sequence=2.0, max_sequence_kv="x")):
        with raises(row):
            batch_plan.repeated_lengths(unread, **{**other, **row[0]})


# ---- run

PAGES = randn(4, 16, 2, 64)
RUNS: dict[tuple[str, ...], list[Row]] = {
    ALL: [({"q": randn(7, 4, 64)}, r"q must have the planned.*rows.*\(7, 4, 64\)")],
    (*ALL, "mixed"): [
        ({"k_scale": float("nan")}, "k_scale must be finite"),
        ({"k_scale": True}, "k_scale must be a number", ArgumentTypeError),
    ],
    ("paged",): [
        *same("must be True or False", ArgumentTypeError, return_lse=1, enable_pdl=1),
        ({"window_left": 5}, r"window_left of run\(\) must be .*the planned -1, got 5"),
        ({"window_left": -1.0}, "window_left must be an int", ArgumentTypeError),
    ],
    ("paged, one cache",): [
        ({"the cache": randn(4, 2, 15, 2, 64)}, r"\[any, 16, 2, 64\].*\(4, 15, 2, 64\)"),
        ({"the cache": randn(4, 2, 16, 2, 128)[..., ::2]}, r"k must have stride 1 on its last axis.*k\.contiguous\(\)"),
        ({"the cache": (PAGES, PAGES, PAGES)}, "paged_kv_cache must be a tensor or a pair", ArgumentTypeError),
        ({"the cache": (PAGES, PAGES[1:])}, "k and v must agree in all axes but the last"),
        ({"the cache": (PAGES[:1], PAGES[:1])}, r"page 0 of request 1, is 1.*0\.\.0"),
    ],
    ("ragged",): [
        ({"k": randn(10, 2, 64)}, r"\[20 or more, 2, 64\].*\(10, 2, 64\)"),
        ({"v": randn(10, 2, 64)}, "v must have shape"),
        ({"v": randn(KEYS + 1, 2, 64)}, "k and v must agree"),
        ({"o_scale": 0.0}, "o_scale must be > 0"),
        ({"lse_base": "e"}, "lse_base must be one of 'log2', 'ln'", LayoutError),
    ],
    ("paged, lse by heads",): [
        ({"lse_base": "e"}, "lse_base must be one of 'log2', 'ln'", LayoutError),
        ({"lse": torch.zeros(8, 4).t()}, "lse must be contiguous"),
    ],
    ("paged, NVFP4",): [({"kv_cache_sf": (zeros(4, 2),)}, "kv_cache_sf must be a tensor or a pair", ArgumentTypeError)],
    ("paged with ranges",): [
        ({"bidirectional_ranges": zeros(2, 8, dtype=torch.int32).t()}, "bidirectional_ranges must be contiguous"),
        ({"bidirectional_ranges": zeros(17, dtype=torch.int32)[1:].view(8, 2)}, "8-byte aligned"),
    ],
    ("mixed",): [({"logits_soft_cap": 30.0}, r"logits_soft_cap of run\(\) must be 0 or the planned 0.0, got 30.0")],
    BLOCKS: [({"k": randn(6, 2, 64)}, r"k must have shape \[N, num_kv_heads, head_dim\] = \[32")],
    ("variable blocks, grouped",): [({"q": randn(2, 8, 64)}, r"q must have shape \[4, 8, head_dim\]")],
}


@of_entries(RUNS)
def test_run(name: str, row: Row) -> None:
    for place in places(row):
        with place:
            assert_refused(begun(name), ENTRIES[name], row)


@pytest.mark.parametrize("name", [*ALL, *BLOCKS, "variable blocks", "paged with sinks", "mixed"])
def test_run_before_plan(name: str) -> None:
    call, given = begun(name), ENTRIES[name].tensors
    new = BatchAttention("NHD", "cpu") if name == "mixed" else type(call.made)(MEMORY)
    for error in (NotPlannedError, RuntimeError, AttributeError):
        with pytest.raises(error, match=r"plan\(\) must come before run"):
            call._replace(made=new)(given)
    call(given)
    call.made.reset_workspace_buffer(MEMORY, MEMORY)
    with pytest.raises(NotPlannedError, match="again after reset_workspace_buffer"):
        call(given)
