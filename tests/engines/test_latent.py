"""Latent attention as engines call it: keywords and their order, caches as they hold them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_attn
from tests.support.mla_case import LATENT, ROPE, MlaCase

STEP = {"heads": 16, "q_lens": (1, 1, 1), "kv_lens": (37, 0, 130)}


def test_sglang_plans_and_runs(device: str) -> None:
    """Pages of one token; a plan by position with every array on the device; parts of a cache as views of one."""
    case = MlaCase(**STEP, page_size=1, device=device, causal=False)
    wrapper = cute_attn.BatchMLAPagedAttentionWrapper(case.workspace(64), backend="auto")
    wrapper.plan(*case.arrays().values(), *case.options().values())
    for _ in range(2):  # layers
        q_nope, q_rope = case.q.split((LATENT, ROPE), dim=-1)
        out = q_nope.new_empty(q_nope.shape)
        found = wrapper.run(q_nope, q_rope, case.cache[:, :, :LATENT], case.cache[:, :, LATENT:], out=out)
        assert found is out
        want, _ = case.expected()
        torch.testing.assert_close(out.double().cpu(), want, rtol=2e-2, atol=2e-2)


def test_sglang_replays_plans_of_graphs(device: str) -> None:
    """Buffers of the largest batch, planned again for every step, for which the step's lengths are padded."""
    bounds = torch.arange(4, dtype=torch.int32, device=device)
    indptr, indices = torch.zeros_like(bounds), torch.zeros(600, dtype=torch.int32, device=device)
    lengths = torch.ones(3, dtype=torch.int32, device=device)
    buffers = {"qo_indptr": bounds, "kv_indptr": indptr, "kv_indices": indices, "kv_len_arr": lengths}
    wrapper = cute_attn.BatchMLAPagedAttentionWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device=device), use_cuda_graph=True, **buffers, backend="auto"
    )
    for seed in range(2):
        case = MlaCase(**{**STEP, "kv_lens": (5 + seed, 1, 100)}, page_size=1, device=device, causal=False, seed=seed)
        indices[: len(case.indices)] = case.indices  # engines fill the buffers by kernels of their own
        arrays = case.arrays(qo_indptr=bounds, kv_indices=indices[: len(case.indices)])
        wrapper.plan(*arrays.values(), *case.options().values())
        case.check(wrapper.run(*case.parts(), return_lse=True))


@pytest.mark.parametrize("function", [MlaCase.trtllm, MlaCase.flash_mla])
def test_vllm_decodes_without_a_plan(function: Callable[[MlaCase], Any], device: str) -> None:
    """In natural-log domain by FlashMLA's name; lse to merge ranks."""
    case = MlaCase(heads=8, q_lens=(3, 3), kv_lens=(70, 40), page_size=64, device=device)
    out, lse = function(case)
    case.check((out, lse if function is MlaCase.trtllm else lse.transpose(1, 2) / math.log(2)))
