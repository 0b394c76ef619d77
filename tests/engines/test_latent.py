"""Latent attention as engines call it: keywords and their order, caches as they hold them."""

from __future__ import annotations

import math

import torch

import cute_attn
from cute_attn import flash_mla
from tests.support.mla_case import LATENT, ROPE, SCALE, MlaCase

STEP = {"heads": 16, "q_lens": (1, 1, 1), "kv_lens": (37, 0, 130)}
DRAFTS = {"heads": 8, "q_lens": (3, 3), "kv_lens": (70, 40)}


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


def test_vllm_decodes_without_a_plan(device: str) -> None:
    """A workspace of int8, an axis of one head in the cache, scales as numbers of Python; lse to merge ranks."""
    case = MlaCase(**DRAFTS, page_size=64, device=device)
    found = cute_attn.decode.trtllm_batch_decode_with_kv_cache_mla(
        query=case.q.view(2, 3, 8, LATENT + ROPE),
        kv_cache=case.cache.unsqueeze(1),
        workspace_buffer=torch.zeros(64 << 20, dtype=torch.int8, device=device),
        qk_nope_head_dim=128,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        block_tables=case.table,
        seq_lens=case.seq_lens,
        max_seq_len=70,
        bmm1_scale=SCALE,
        bmm2_scale=1.0,
        return_lse=True,
    )
    case.check(found)


def test_vllm_decodes_by_flash_mla(device: str) -> None:
    case = MlaCase(**DRAFTS, page_size=64, device=device)
    metadata, num_splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q=case.q.view(2, 3, 8, LATENT + ROPE),
        k_cache=case.cache.unsqueeze(-2),
        block_table=case.table,
        cache_seqlens=case.seq_lens,
        head_dim_v=LATENT,
        tile_scheduler_metadata=metadata,
        num_splits=num_splits,
        softmax_scale=SCALE,
        causal=True,
    )
    case.check((out, lse.transpose(1, 2) / math.log(2)))
