"""The functions without a plan that vLLM 0.33.0 calls: XQA on Hopper, TRT-LLM's decode and prefill functions, helpers.

vLLM's workspace is zeroed and shared; lengths and block tables are on the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import decode, prefill, utils
from tests.engines.conftest import held
from tests.support.engine_case import (
    BF16,
    E4M3,
    Batch,
    Graph,
    Tokens,
    assert_close,
    assert_lse,
    draft_mask,
    merge,
    nvfp4_cache,
    workspace,
)

SCALE = 0.11
DECODE = Batch((1, 1, 1), (33, 5, 70))
SINKS = (0.5, -1.0, 2.0, 0.0)
LAYOUTS = pytest.mark.parametrize("layout", ["NHD", "HND"])


def counter_buffer(tokens: Tokens, most_tokens: int = 64) -> torch.Tensor:
    """The buffer that vLLM allocates per layer, for its largest batch."""
    sms = utils.get_device_sm_count(torch.device("cuda")) if tokens.device == "cuda" else 132
    size = utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(most_tokens, tokens.batch.heads[0], sms)
    assert size == 4 * -(-max(most_tokens * tokens.batch.heads[0], sms) // 8) * 8
    return torch.zeros(size, dtype=torch.uint8, device=tokens.device)


# ---- XQA


def xqa_arguments(tokens: Tokens, layout: str, cache: Any = None, **changes: Any) -> dict[str, Any]:
    """Those of `flashinfer_xqa_batch_decode_with_kv_cache` as `FlashInferImpl.forward` calls it."""
    arguments: dict[str, Any] = {"bmm1_scale": SCALE, "bmm2_scale": 1.0, "window_left": -1, "sinks": None}
    arguments |= {"q_len_per_req": 1, "mask": None, "q_cu_seq_lens": None, "kv_cache_sf": None, "query": tokens.q}
    arguments |= {"block_tables": tokens.block_tables(8), "seq_lens": tokens.seq_lens, "kv_layout": layout}
    arguments |= {"out": torch.empty_like(tokens.q, dtype=BF16), "max_seq_len": max(tokens.batch.kv_lens)}
    arguments |= {"kv_cache": tokens.caches(layout, fused=True) if cache is None else cache}
    arguments |= {"workspace_buffer": workspace(tokens.device, 32), **changes}
    return arguments


def xqa(*given: Any, **changes: Any) -> torch.Tensor:
    arguments = xqa_arguments(*given, **changes)
    decode.xqa_batch_decode_with_kv_cache(**arguments)
    return arguments["out"]


@LAYOUTS
@pytest.mark.parametrize("window_left", [-1, 20])
def test_xqa_decode(layout: str, window_left: int, device: str) -> None:
    tokens, sinks = Tokens(DECODE, device), torch.tensor(SINKS, device=device)
    out = xqa(tokens, layout, window_left=window_left, sinks=sinks)
    assert_close(out, tokens.expected(SCALE, window_left=window_left, sinks=sinks)[0])


def test_xqa_decode_over_an_fp8_cache(device: str) -> None:
    """The scale of the keys is part of bmm1_scale, that of the values bmm2_scale."""
    tokens = Tokens(Batch(DECODE.q_lens, DECODE.kv_lens, kv_dtype=E4M3), device)
    out = xqa(tokens, "HND", bmm1_scale=SCALE * 0.6, bmm2_scale=1.7)
    assert_close(out, tokens.expected(SCALE * 0.6, v_scale=1.7)[0], 8e-3)


@LAYOUTS
def test_xqa_decode_over_an_nvfp4_cache(layout: str, device: str) -> None:
    tokens = Tokens(DECODE, device)
    data, scales, held = nvfp4_cache(tokens, layout)
    out = xqa(tokens, layout, data, bmm1_scale=SCALE * 0.002, bmm2_scale=0.003, kv_cache_sf=scales)
    assert_close(out, held.expected(SCALE)[0], 8e-3)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "draft"])
@pytest.mark.parametrize("q_len", [3, 35])
def test_xqa_verification(q_len: int, causal: bool, device: str) -> None:
    """As many tokens for every request, and the builder's mask, of which requests have a slice."""
    tokens = Tokens(Batch((q_len,) * 3, (40, q_len, 75)), device)
    one = draft_mask([q_len], q_len, causal)
    mask = one[None].expand(8, -1, -1).contiguous().to(device)[:3]
    out = xqa(tokens, "NHD", q_len_per_req=q_len, mask=mask)
    keep = None if causal else [torch.ones(q_len, n) for n in tokens.batch.kv_lens]
    assert_close(out, tokens.expected(SCALE, causal=True, keep=keep)[0])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "draft"])
def test_xqa_verification_of_unequal_drafts(causal: bool, device: str) -> None:
    q_lens = (4, 1, 2)
    tokens = Tokens(Batch(q_lens, (40, 7, 75)), device)
    mask = draft_mask(q_lens, 4, causal).to(device)
    out = xqa(tokens, "NHD", q_len_per_req=4, mask=mask, q_cu_seq_lens=tokens.qo_indptr.to(device))
    keep = None if causal else [torch.ones(q, n) for q, n in zip(q_lens, tokens.batch.kv_lens, strict=True)]
    assert_close(out, tokens.expected(SCALE, causal=True, keep=keep)[0])


@pytest.mark.parametrize("dim", [64, 256])
def test_xqa_head_dimensions(dim: int, device: str) -> None:
    tokens = Tokens(Batch(DECODE.q_lens, DECODE.kv_lens, dim=dim), device)
    assert_close(xqa(tokens, "NHD"), tokens.expected(SCALE)[0])


def test_captured_xqa_decode(device: str) -> None:
    """Lengths, tables and tokens change in place; padded requests have no keys."""
    lengths = [(33, 5, 70), (128, 1, 0), (16, 0, 0), (100, 90, 80)]
    tokens = [Tokens(Batch((1,) * 3, n, num_pages=30, seed=i), device) for i, n in enumerate(lengths)]
    query, tables, lens, *cache = (x.clone() for x in held(tokens[0]))
    kept = {"query": query, "block_tables": tables, "seq_lens": lens, "out": (out := torch.empty_like(query))}
    kept |= {"workspace_buffer": workspace(device, 32), "max_seq_len": 128}
    arguments = xqa_arguments(tokens[0], "NHD", tuple(cache), **kept)  # made before the capture
    graph = Graph(device, lambda: decode.xqa_batch_decode_with_kv_cache(**arguments))
    for now in tokens:
        for target, source in zip((query, tables, lens, *cache), held(now), strict=True):
            target.copy_(source)
        out.fill_(7.0)
        assert_close(graph.replay(), now.expected(SCALE)[0])


# ---- TRT-LLM's functions, which vLLM calls on Blackwell


def trtllm_decode(tokens: Tokens, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"q_len_per_req": 1, "max_q_len": None, "cum_seq_lens_q": None, "lse": None}
    arguments |= {"out": torch.empty_like(tokens.q, dtype=BF16), "return_lse": False, **changes}
    return decode.trtllm_batch_decode_with_kv_cache(
        query=tokens.q,
        kv_cache=tokens.caches("HND", fused=True),
        workspace_buffer=workspace(tokens.device, 32),
        block_tables=tokens.block_tables(8),
        seq_lens=tokens.seq_lens,
        max_seq_len=max(tokens.batch.kv_lens),
        bmm1_scale=SCALE,
        bmm2_scale=1.5,
        window_left=-1,
        sinks=torch.tensor(SINKS, device=tokens.device),
        o_sf_scale=None,
        kv_layout="HND",
        backend="trtllm-gen",
        kv_cache_sf=None,
        multi_ctas_kv_counter_buffer=counter_buffer(tokens),
        **arguments,
    )


def trtllm_expected(tokens: Tokens, **options: Any) -> Any:
    return tokens.expected(SCALE, sinks=torch.tensor(SINKS), v_scale=1.5, **options)


@pytest.mark.parametrize("q_len", [1, 3])
def test_trtllm_decode(q_len: int, device: str) -> None:
    tokens = Tokens(Batch((q_len,) * 3, (33, 5, 70)), device)
    out = trtllm_decode(tokens, q_len_per_req=q_len)
    assert out.shape == tokens.q.shape
    assert_close(out, trtllm_expected(tokens, causal=True)[0])


def test_trtllm_decode_of_unequal_drafts(device: str) -> None:
    """A graph's padding leaves requests without tokens."""
    tokens = Tokens(Batch((4, 1, 0, 2), (33, 5, 1, 70)), device)
    bounds = tokens.qo_indptr.to(device)
    out = trtllm_decode(tokens, q_len_per_req=None, max_q_len=4, cum_seq_lens_q=bounds)
    assert_close(out, trtllm_expected(tokens, causal=True)[0])


def test_trtllm_decode_over_shards_of_the_keys(device: str) -> None:
    tokens, parts = Tokens(DECODE, device), []
    for rank in range(2):
        shard = tokens.shard(rank, 2)
        lse = torch.empty(shard.q.shape[:2], dtype=torch.float32, device=device)
        found = trtllm_decode(shard, lse=lse, return_lse=True)
        assert found[1] is lse
        parts.append(found)
        assert_lse(lse, trtllm_expected(shard)[1])
    merge(parts)


def trtllm_context(tokens: Tokens, **changes: Any) -> Any:
    batch, device = tokens.batch, tokens.device
    arguments: dict[str, Any] = {"window_left": -1, "bmm1_scale": SCALE, "bmm2_scale": 1.0, **changes}
    return prefill.trtllm_batch_context_with_kv_cache(
        query=tokens.q,
        kv_cache=tokens.caches("HND", fused=True),
        workspace_buffer=workspace(device, 32),
        block_tables=tokens.block_tables(8),
        seq_lens=tokens.seq_lens,
        max_q_len=max(batch.q_lens),
        max_kv_len=max(batch.kv_lens),
        batch_size=len(batch.q_lens),
        cum_seq_lens_q=tokens.qo_indptr.to(device),
        cum_seq_lens_kv=tokens.kv_indptr.to(device),  # of pages
        **arguments,
    )


@pytest.mark.parametrize("window_left", [-1, 9])
def test_trtllm_prefill(window_left: int, device: str) -> None:
    tokens = Tokens(Batch((7, 1, 20), (30, 17, 20)), device)
    sinks, out = torch.tensor(SINKS, device=device), torch.empty_like(tokens.q)
    found = trtllm_context(
        tokens,
        window_left=window_left,
        sinks=sinks,
        o_sf_scale=None,
        out=out,
        kv_cache_sf=None,
        multi_ctas_kv_counter_buffer=counter_buffer(tokens),
    )
    assert found is out
    assert_close(out, tokens.expected(SCALE, causal=True, window_left=window_left, sinks=sinks)[0])


def test_trtllm_prefill_over_a_shard_of_the_context(device: str) -> None:
    tokens = Tokens(Batch((7, 1, 20), (12, 17, 33)), device)
    out, lse = torch.empty_like(tokens.q), torch.empty(tokens.q.shape[:2], device=device)
    found = trtllm_context(tokens, bmm2_scale=1.5, causal=False, return_lse=True, lse=lse, out=out)
    assert found[0] is out
    assert found[1] is lse
    expected = tokens.expected(SCALE, v_scale=1.5)
    assert_close(out, expected[0])
    assert_lse(lse, expected[1])


# ---- multi-head latent attention


def trtllm_ragged(tokens: Tokens, **changes: Any) -> Any:
    """`TrtllmRaggedPrefillBackend`'s call. It hands over an output of the model's dtype."""
    batch, device = tokens.batch, tokens.device
    k, v = tokens.ragged()
    out = torch.empty(len(tokens.q), batch.heads[0], batch.dim_vo or batch.dim, dtype=BF16, device=device)
    return prefill.trtllm_ragged_attention_deepseek(
        query=tokens.q,
        key=k,
        value=v,
        workspace_buffer=workspace(device, 32),
        seq_lens=tokens.seq_lens,
        max_q_len=max(batch.q_lens),
        max_kv_len=max(batch.kv_lens),
        bmm1_scale=SCALE,
        bmm2_scale=1.0,
        o_sf_scale=1.0,
        batch_size=len(batch.q_lens),
        window_left=-1,
        cum_seq_lens_q=tokens.qo_indptr.to(device),
        cum_seq_lens_kv=tokens.token_indptr.to(device),
        enable_pdl=False,
        out=out,
        **changes,
    )


def latent(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], dtype: torch.dtype = BF16) -> Batch:
    """Tokens of DeepSeek's head dimensions, whose heads have keys of their own."""
    return Batch(q_lens, kv_lens, heads=(2, 2), dim=192, dim_vo=128, dtype=dtype, kv_dtype=dtype)


@pytest.mark.parametrize("return_lse", [False, True])
def test_new_tokens_of_latent_attention(return_lse: bool, device: str) -> None:
    tokens = Tokens(latent((7, 1, 20), (7, 1, 20)), device)
    found = trtllm_ragged(tokens, is_causal=True, return_lse=return_lse, skip_all_rows_active_check=True)
    expected, lse = tokens.expected(SCALE, causal=True)
    assert_close(found[0] if return_lse else found, expected)
    if return_lse:
        assert_lse(found[1], lse)


def test_a_chunk_of_the_context_of_latent_attention(device: str) -> None:
    """Requests whose context has ended have no keys in a later chunk: the engine merges by the lse, which is -inf."""
    tokens = Tokens(latent((7, 1, 20), (12, 0, 33)), device)
    out, lse = trtllm_ragged(tokens, is_causal=False, return_lse=True, skip_all_rows_active_check=False)
    expected = tokens.expected(SCALE)
    assert_close(out, expected[0])
    assert_lse(lse, expected[1])
    assert not out[7].any()


# ---- helpers


def test_an_nvfp4_output_is_refused_with_a_reason(device: str) -> None:
    tokens = Tokens(DECODE, device)
    data, scale = torch.zeros(3, 4, 64, dtype=torch.uint8, device=device), torch.zeros(128, 32, device=device).to(E4M3)
    with pytest.raises(NotImplementedError, match=r"[Nn][Vv][Ff][Pp]4"):
        trtllm_decode(tokens, out=utils.FP4Tensor(data, scale, 0, tokens.q.shape))
