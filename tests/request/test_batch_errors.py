"""Every bad argument of a batch raises before anything runs: a type that callers can catch, a message that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    BatchPrefillWithRaggedKVCacheWrapper,
    LayoutError,
    NotPlannedError,
    NotSupported,
    RuntimeArgumentError,
)
from cute_attn.request import batch_plan, operands
from cute_attn.request.index_arrays import IndexArrays
from tests.support.error_rows import SETTINGS, Row, ints, paged, refused, workspace, wrong_type, zeros

FLOAT = torch.float32


def cache(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return zeros(*(shape or (5, 2, 4, 2, 16)), dtype=dtype)


# ---- constructors

MAKE = [
    wrong_type({"float_workspace_buffer": 128}, "float_workspace_buffer", "128"),
    refused(
        {"float_workspace_buffer": workspace()[1:]}, "float_workspace_buffer must start at a multiple of 16", "% 16 = "
    ),
    refused({"float_workspace_buffer": workspace()[::2]}, "float_workspace_buffer must be contiguous", "(2,)"),
    refused(
        {"float_workspace_buffer": workspace().to("meta")},
        "float_workspace_buffer must be on a cpu or cuda device",
        "meta",
    ),
    refused({"backend": "trtllm-gen"}, "trtllm-gen refuses", 'backend="auto"', error=NotSupported),
]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("row", MAKE, ids=lambda row: row.name)
def test_constructor(kind: str, row: Row) -> None:
    arguments = {"float_workspace_buffer": workspace(), **row.arguments}
    raises(row, lambda: SETTINGS[kind]().wrapper(**arguments))


def raises(row: Row, function: Callable[[], Any]) -> None:
    with pytest.raises(row.error) as error:
        function()
    assert type(error.value) is row.error or row.error is ArgumentError
    for part in row.message:
        assert part in str(error.value)


GRAPH = [  # of the ragged wrapper; those of the others: test_flashinfer_keywords
    refused({"qo_indptr_buf": ints(0, 0, 0)}, "kv_indptr_buf must have 3 elements for batch size 2, got 2"),
    refused({"kv_indptr_buf": ints(0, 0).long()}, "kv_indptr_buf must have dtype int32", "int64"),
    refused({"kv_indptr_buf": ints(0, 0, 0, 0)[::2]}, "kv_indptr_buf must be contiguous"),
    refused({"kv_indptr_buf": ints(0, 0).to("meta")}, "must be on the workspace's device cpu", "meta"),
    refused({"custom_mask_buf": workspace(8)}, "mask_indptr_buf must be a torch.Tensor"),
    refused({"custom_mask_buf": workspace(8), "mask_indptr_buf": ints(0)}, "mask_indptr_buf must have 2 elements"),
]


@pytest.mark.parametrize("row", GRAPH, ids=lambda row: row.name)
def test_graph_constructor(row: Row) -> None:
    good = {"qo_indptr_buf": ints(0, 0), "kv_indptr_buf": ints(0, 0)}
    made = BatchPrefillWithRaggedKVCacheWrapper
    raises(row, lambda: made(workspace(), use_cuda_graph=True, **good | row.arguments))


# ---- plan

ITEMS: dict[str, Any] = {  # a good call: kv_len - prefix_len is 5, 0 and 3
    "prefix_len_ptr": ints(2, 0, 1),
    "token_pos_in_items_ptr": ints(0, 1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 1, 2),
    "token_pos_in_items_len": 5,
    "max_item_len_ptr": ints(2, 0, 2),
}

JUMP = ints(0, 1, 0, 2, 3, 0, 0, 0, 0, 0, 0, 1, 2)
MULTI_ITEM = [
    row._replace(arguments={**ITEMS, **row.arguments})
    for row in (
        wrong_type({"prefix_len_ptr": [2, 0, 1]}, "prefix_len_ptr must be a torch.T"),
        refused({"prefix_len_ptr": zeros(3)}, "prefix_len_ptr must have", "float16"),
        refused({"prefix_len_ptr": ints(2, 0, 1)[None]}, "prefix_len_ptr", "1 dimension"),
        refused({"prefix_len_ptr": ints(2, 0)}, "[batch_size] = (3,), got 2 elements"),
        refused({"prefix_len_ptr": ints(2, -1, 0)}, "must not be negative, got -1"),
        refused({"prefix_len_ptr": ints(2, 0, 1).to("meta")}, "prefix_len_ptr", "meta"),
        refused({"max_item_len_ptr": ints(3)}, "max_item_len_ptr must have shape"),
        refused({"max_item_len_ptr": ints(2, 0, 1)}, "request 2 has 1", "token at 2"),
        refused({"token_pos_in_items_len": 4}, "at least kv_len", "request 0 needs 5, got 4"),
        refused({"token_pos_in_items_len": -1}, "must be at least 0, got -1"),
        refused({"token_pos_in_items_ptr": ints(*range(11))}, "the 13 elements", "11"),
        refused({"token_pos_in_items_ptr": JUMP}, "must not grow by more than 1", "got 2 after 0 (request 0, key 5)"),
        refused({"custom_mask": torch.ones(29, dtype=torch.bool)}, "contradict"),
        refused({"packed_custom_mask": workspace(4)}, "contradict", "prefix_len_ptr"),
    )
]

PLAN = [  # of all wrappers
    refused({"num_kv_heads": 3}, "multiple of num_kv_heads", "4 and 3", error=RuntimeArgumentError),
    refused({"num_qo_heads": 0}, "num_qo_heads must be at least 1, got 0"),
    wrong_type({"num_qo_heads": 4.0}, "num_qo_heads must be an int", "4.0"),
    wrong_type({"num_kv_heads": None}, "num_kv_heads must be an int", "None"),
    refused({"q_data_type": FLOAT}, "q_data_type must be float16 or bfloat16", "float32"),
    refused({"q_data_type": "Tensor"}, "q_data_type must name a dtype", "'Tensor'"),
    refused({"kv_data_type": torch.int8}, "kv_data_type must be", "int8"),
    refused({"o_data_type": torch.int8}, "o_data_type must be", "int8"),
    refused({"sm_scale": float("nan")}, "sm_scale must be finite"),
    refused({"rope_theta": 0}, "rope_theta must be > 0"),
    refused({"lse_base": "e"}, "lse_base must be one of 'log2', 'ln'", "'e'", error=LayoutError),
    refused({"fixed_split_size": 0}, "fixed_split_size must be at least 1, got 0"),
    refused({"fixed_split_size": -2}, "fixed_split_size must be at least 1, got -2"),
    refused({"fixed_split_size": 0, "disable_split_kv": True}, "fixed_split_size must be at least 1, got 0"),
    refused({"sm_scale": 10**5000}, "sm_scale must be finite"),
    refused({"head_dimension": 3}, "head_dimension", error=TypeError),
]

PAGED = [  # of both wrappers with pages; names of index arrays are the decode wrapper's
    refused({"page_size": 0}, "page_size must be at least 1, got 0"),
    refused({"page_size": 1 << 31}, "page_size must be at most 2147483647, got 2147483648"),
    wrong_type({"page_size": 4.0}, "page_size must be an int"),
    wrong_type({"indptr": [0, 2]}, "indptr must be a torch.Tensor", "[0, 2]"),
    refused({"indptr": zeros(4)}, "indptr must have dtype int32 or int64", "float16"),
    refused({"indptr": ints(0, 2, 2, 3)[None]}, "indptr must have shape [n]", "(1, 4)"),
    refused(
        {"indptr": ints(0, 2, 1, 3)}, "must not decrease", "got 1 after 2", "request 1", error=RuntimeArgumentError
    ),
    refused({"indptr": ints(-1, 2, 2, 3)}, "must stay within 0..", "-1..3"),
    refused({"last_page_len": ints(3, 0, 5)}, "must be within 1..4", "request 2 has 5"),
    refused({"last_page_len": ints(0, 0, 4)}, "must be within 1..4", "request 0 has 0"),
    refused({"last_page_len": ints(3, 4)}, "must have shape [batch_size] = (3,)", "got 2"),
    refused({"indices": ints(4, 0)}, "must have the 3 entries", "got 2"),
    refused({"indices": zeros(3)}, "must have dtype int32 or int64", "float16"),
    refused({"indices": ints(4, 0, 2)[None]}, "must have shape [n]", "(1, 3)"),
    refused({"indices": ints(4, 0, 2).to("meta")}, "must be on a cpu or cuda", "meta"),
    refused({"kv_data_type": "uint8", "head_dim": 24}, "multiples of 16", "24"),
    refused({"kv_data_type": "uint8", "head_dim": 15}, "even head dimensions", "15"),
]

PREFILL = [  # of both prefill wrappers
    wrong_type({"qo_indptr": np.arange(4)}, "qo_indptr must be a torch.Tensor", "ndarray"),
    refused({"qo_indptr": ints(0, 3, 2, 5)}, "qo_indptr must not decrease", "request 1", error=RuntimeArgumentError),
    refused({"qo_indptr": ints(0, 5)}, "must both have batch_size + 1", "2 and 4"),
    refused({"qo_indptr": ints()}, "qo_indptr must have shape [batch_size + 1]"),
    refused({"custom_mask": torch.ones(28, dtype=torch.bool)}, "custom_mask", "= 29", "got 28"),
    refused({"custom_mask": ints(*range(29))}, "custom_mask must have dtype bool or uint8", "int32"),
    refused({"custom_mask": torch.ones(1, 29, dtype=torch.bool)}, "custom_mask must have shape [n]", "(1, 29)"),
    refused({"packed_custom_mask": workspace(5)}, "packed_custom_mask must have 4 bytes", "segment_packbits", "got 5"),
    refused({"packed_custom_mask": ints(1)}, "packed_custom_mask must have dtype uint8", "int32"),
    *MULTI_ITEM,
    refused({"head_dim_qk": 0}, "head_dim_qk must be at least 1"),
    refused({"head_dim_vo": -3}, "head_dim_vo must be at least 1, got -3"),
    refused({"head_dim_qk": 15, "pos_encoding_mode": "ROPE_LLAMA"}, "even head dim", "15"),
    wrong_type({"head_dim": 16}, "head_dim and head_dim_qk are two names"),
]

RAGGED = [
    refused({"kv_indptr": ints(0, 7, 6, 11)}, "kv_indptr must not decrease", error=RuntimeArgumentError),
    refused({"kv_indptr": ints(0, 0, 0, 1 << 31, dtype=torch.int64)}, "kv_indptr must stay within"),
]

DECODE = [
    refused({"q_len_per_req": 0}, "q_len_per_req must be at least 1, got 0"),
    refused({"q_len_per_req": 10**30}, "q_len_per_req must be at most"),
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seq_lens": [5]}, "seq_lens must be a torch.Tensor"),
        ({"seq_lens_q": "x"}, "seq_lens_q must be a torch.Tensor"),
        ({"max_token_per_sequence": 2.0}, "max_token_per_sequence must be an int"),
        ({"max_sequence_kv": "x"}, "max_sequence_kv must be an int"),
    ],
)
def test_lengths_that_are_given_again_have_types_where_they_are_not_compared(given: Any, message: str) -> None:
    """Beside index arrays on a GPU."""
    unread = IndexArrays(("qo_indptr", "kv_indptr"), ints(0, 2), ints(0, 5)).on_device(torch.device("cpu"))
    other = {"seq_lens": ints(9), "seq_lens_q": ints(9), "max_token_per_sequence": 0, "max_sequence_kv": 0}
    batch_plan.repeated_lengths(unread, **other)
    with pytest.raises(ArgumentTypeError, match=message):
        batch_plan.repeated_lengths(unread, **{**other, **given})


# ---- run

RUN = [  # of all wrappers
    refused({"q": zeros(2, 4, 16)}, "q must have the planned", "rows", "(2, 4, 16)"),
    refused({"q_scale": float("nan")}, "q_scale must be finite"),
]

RUN_PAGED = [
    refused({"paged_kv_cache": cache(5, 2, 3, 2, 16)}, "[any, 4, 2, 16]", "(5, 3, 2, 16)"),
    refused(
        {"paged_kv_cache": cache(5, 2, 4, 2, 32)[..., ::2]}, "k must have stride 1 on its last axis", "k.contiguous()"
    ),
    refused(
        {"paged_kv_cache": (cache(5, 4, 2, 16), cache(4, 4, 2, 16))}, "k and v must agree in all axes but the last"
    ),
    refused({"paged_kv_cache": cache(4, 2, 4, 2, 16)}, "page 0 of request 0, is 4", "0..3"),
]

RUN_RAGGED = [
    refused({"k": zeros(10, 2, 16)}, "[11 or more, 2, 16]", "(10, 2, 16)"),
    refused({"v": zeros(10, 2, 16)}, "v must have shape"),
    refused({"v": zeros(12, 2, 16)}, "k and v must agree"),
    refused({"o_scale": 0.0}, "o_scale must be > 0"),
]


def run_rows() -> list[tuple[str, Row]]:
    rows = [(kind, row) for kind in SETTINGS for row in RUN]
    rows += [(kind, row) for kind in ("paged", "decode") for row in RUN_PAGED]
    return rows + [("ragged", row) for row in RUN_RAGGED]


@pytest.mark.parametrize(("kind", "row"), run_rows(), ids=[f"{kind}-{row.name}" for kind, row in run_rows()])
def test_run(kind: str, row: Row) -> None:
    """The same error each time, and good runs before and after."""
    setting = SETTINGS[kind]()
    made = setting.wrapper(workspace())
    made.plan(**setting.plan)
    arguments = {**setting.run, **row.arguments}
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


def test_block_scales_of_one_half() -> None:
    setting = paged()
    made = setting.wrapper(workspace())
    made.plan(**setting.plan, kv_data_type="uint8")
    good, scales = cache(5, 2, 4, 2, 8, dtype=torch.uint8), cache(5, 2, 4, 2, 1, dtype=torch.uint8)
    made.run(setting.run["q"], good, kv_cache_sf=scales)
    with pytest.raises(ArgumentTypeError, match="kv_cache_sf must be a tensor or a pair"):
        made.run(setting.run["q"], good, kv_cache_sf=(scales[:, 0],))


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
