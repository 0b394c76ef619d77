"""Decode calls without a plan whose lengths, page numbers or buffers are wrong."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from cute_attn import ArgumentError, xqa_batch_decode_with_kv_cache
from cute_attn.wrappers import calls
from cute_attn.xqa import xqa
from perf.pretended_gpu import NullDriver
from tests.support import decode_refusals
from tests.support.launch_corpus import pretended
from tests.support.xqa_case import XqaCase, build

CASE = XqaCase((57, 5), heads=(4, 2), head_dim=64)


@pytest.mark.parametrize(("name", "form"), decode_refusals.CALLS)
def test_wrong_calls(name: str, form: str) -> None:
    decode_refusals.assert_refused(name, form)


def test_the_first_wrong_request_is_named() -> None:
    built = build(CASE)
    table = built.arguments["block_tables"][:, :3]
    with pytest.raises(ArgumentError, match="the 3 pages of block_tables times 16 tokens; request 0 has 57"):
        xqa_batch_decode_with_kv_cache(**built.arguments | {"block_tables": table})


def test_the_low_level_form_names_its_own_arguments() -> None:
    xqa(**build(CASE).low_level())
    table = build(CASE).arguments["block_tables"].clone()
    table[1, 0] = -5
    with pytest.raises(ArgumentError, match=r"page_table\[1, 0\], page 0 of request 1, is -5"):
        xqa(**build(CASE).low_level(page_table=table))
    narrow = build(CASE).low_level(page_table=table[:, : table.shape[1] // 2].contiguous())
    looking = mock.patch.object(calls, "looks_at_values", return_value=True)  # as with CUTE_ATTN_VALIDATE=1
    with pretended(NullDriver()), looking, pytest.raises(ArgumentError, match=r"pages of page_table times 16 tokens"):
        xqa(**narrow)


def test_rows_of_no_request_need_an_out() -> None:
    """Query bounds may end early, as those of padded batches do, where nothing unwritten is returned."""
    built = build(dataclasses.replace(CASE, q_len=3, q_lens=(3, 1)))
    a = built.arguments
    padded = a | {"query": torch.cat((a["query"], a["query"][:2])), "return_lse": False}
    with pytest.raises(ArgumentError, match="q_cu_seq_lens must end at 6, the rows of query, got 4"):
        xqa_batch_decode_with_kv_cache(**padded)
    out = torch.full_like(padded["query"], 7.0)
    xqa_batch_decode_with_kv_cache(**padded | {"out": out})
    assert built.check(out[:4], None) == ""
    assert (out[4:] == 7).all()
