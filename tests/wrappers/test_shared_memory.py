"""Buffers and arrays of a wrapper that share memory: copied aside, or refused before anything is written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from tests.support.batch_case import decode, heads, make, paged
from tests.wrappers.kinds import made_for, plan_and_run, plan_case, run

DECODE = decode((40, 3, 9), page_size=4, **heads(4, 2))
PAGED = paged((5, 1, 17), (40, 3, 33), page_size=4, mask="custom", **heads(4, 2))


@pytest.mark.parametrize("name", ["strided", "shifted", "itself", "int64", "strided int64"])
def test_page_numbers_in_their_own_buffer(name: str) -> None:
    """The caller may have packed them there, at any stride: reading and writing must not cross."""
    inputs = make(DECODE)
    made: Any = made_for(DECODE)
    buffer, used = made._paged_kv_indices_buf, int(inputs.kv_indptr[-1])
    wide = torch.zeros(40, dtype=torch.int64)
    view = {
        "strided": buffer[::2][:used],
        "shifted": buffer[3 : 3 + used],
        "itself": buffer[:used],
        "int64": wide[:used],
        "strided int64": wide[::2][:used],
    }[name]
    view.copy_(inputs.kv_indices[:used])
    plan_case(DECODE, made, indices=view)
    assert torch.equal(buffer[:used], inputs.kv_indices[:used])
    run(DECODE, inputs, made)


def test_mask_bits_in_their_own_buffer() -> None:
    case = dataclasses.replace(PAGED, mask="packed")
    inputs = make(case)
    made: Any = made_for(case)
    for start in (0, 5):
        bits = inputs.masks["packed_custom_mask"]
        view = made._custom_mask_buf[start : start + len(bits)]
        view.copy_(bits)
        plan_and_run(case, made, packed_custom_mask=view)


def test_index_buffers_must_be_apart() -> None:
    decode_made, prefill_made, memory = made_for(DECODE, pages=64), made_for(PAGED), torch.zeros(64, dtype=torch.int32)
    decode_buffers, prefill_buffers = (made._place.graph.buffers for made in (decode_made, prefill_made))
    shared = {"paged_kv_indptr_buffer": memory[:4], "paged_kv_indices_buffer": memory[3:40]}
    with pytest.raises(ArgumentError, match="paged_kv_indices_buffer must not share memory with paged_kv_indptr_buf"):
        BatchDecodeWithPagedKVCacheWrapper(memory.clone(), use_cuda_graph=True, **decode_buffers | shared)
    shared = {"qo_indptr_buf": memory[4:8]}
    with pytest.raises(ArgumentError, match="qo_indptr_buf must not share memory with float_workspace_buffer"):
        BatchPrefillWithPagedKVCacheWrapper(memory, use_cuda_graph=True, **prefill_buffers | shared)
    with pytest.raises(ArgumentError, match="float_workspace_buffer must not share memory with paged_kv_indices_buf"):
        decode_made.reset_workspace_buffer(decode_made._paged_kv_indices_buf[4:])
