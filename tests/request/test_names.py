"""Errors name arguments of the function that was called, not those of the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_attn as ca
from cute_attn.request.names import rename
from cute_attn.xqa import xqa

WORKSPACE = torch.zeros(1 << 16, dtype=torch.uint8)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


LENGTHS: dict[str, Any] = {"seq_lens": ints(3, 4), "workspace_buffer": WORKSPACE}
TABLES = ints(0, 1)[:, None]
BOTH = {"query": halves(2, 4, 64), "kv_cache": halves(2, 2, 16, 2, 64), "block_tables": TABLES, **LENGTHS}


def plan(**options: Any) -> None:
    wrapper = ca.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(ints(0, 2), ints(0, 1), ints(0), ints(4), 4, 2, 16, 4, **options)


def shared_prefix(*last: int) -> None:
    wrapper = ca.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(ints(0, 1, 2), ints(0, 1), ints(*last), 4, 2, 64, 16)


def decode(**options: Any) -> None:
    ca.trtllm_batch_decode_with_kv_cache(**{**BOTH, "max_seq_len": 16, "kv_layout": "NHD", **options})


def context(**options: Any) -> None:
    given = {"max_q_len": 1, "max_kv_len": 16, "bmm1_scale": 0.25, "bmm2_scale": 1.0, "batch_size": 2}
    bounds = {"cum_seq_lens_q": ints(0, 1, 2), "cum_seq_lens_kv": ints(0, 3, 7), "kv_layout": "NHD"}
    ca.trtllm_batch_context_with_kv_cache(**{**BOTH, **given, **bounds, **options})


def low_level(**options: Any) -> None:
    caches = {"k_cache": halves(2, 16, 2, 64), "v_cache": halves(2, 16, 2, 64), "page_table": TABLES, **LENGTHS}
    rest = {"semaphores": WORKSPACE.clone(), "num_kv_heads": 2, "page_size": 16, "kv_layout": "NHD"}
    xqa(**{"q": halves(2, 1, 4, 64), "output": halves(2, 1, 4, 64), **caches, **rest, **options})


GRAD = torch.ones(1, requires_grad=True)
BAD: list[tuple[str, Callable[[], Any]]] = [
    ("q_data_type", lambda: plan(q_data_type=torch.int8)),
    ("kv_data_type", lambda: plan(q_data_type="bfloat16", kv_data_type=torch.int8)),
    ("unique_kv_last_page_len", lambda: shared_prefix(16, 99)),
    ("max_q_len", lambda: decode(max_q_len="x", cum_seq_lens_q=ints(0, 1, 2))),
    ("cum_seq_lens_q", lambda: decode(max_q_len=1, cum_seq_lens_q="x")),
    ("bmm1_scale_log2", lambda: decode(bmm1_scale_log2=torch.tensor(3))),
    ("out_dtype", lambda: decode(out_dtype=torch.float32)),
    ("bmm1_scale", lambda: context(bmm1_scale=GRAD)),
    ("bmm2_scale", lambda: context(bmm2_scale=GRAD)),
    ("out_dtype", lambda: context(out_dtype=torch.int8)),
    ("k_cache", lambda: low_level(k_cache=None)),
    ("page_table", lambda: low_level(page_table=None)),
    ("output", lambda: low_level(output=torch.empty(2, 1, 4, 64, dtype=torch.float64))),
    ("q_seq_len", lambda: low_level(q_seq_len="x")),
]


@pytest.mark.parametrize(("name", "call"), BAD, ids=[name for name, _ in BAD])
def test_names_are_those_of_the_call(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises((ca.ArgumentError, ca.ArgumentTypeError), match=rf"^{name}\b"):
        call()


def test_words_inside_of_a_message_stay() -> None:
    error = ca.ArgumentError("out must not run out of q_len; q_len_per_req and x.q_len are others")
    rename(error, {"out": "output", "q_len": "rows"})
    assert str(error) == "output must not run out of rows; q_len_per_req and x.q_len are others"
