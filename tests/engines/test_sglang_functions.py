"""The functions without a plan that SGLang 0.5.23 calls: TRT-LLM's decode and prefill functions, and Hopper's FMHA.

Written after reading `srt/layers/attention/trtllm_mha_backend.py` and what shares its calls: sparse decode and the
diffusion models. Caches are HND views; the decode functions' default layout is HND.
"""

from __future__ import annotations

import inspect
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
    draft_mask,
    ends,
    nvfp4_cache,
    workspace,
)

SCALE = 0.11
MOST = 128  # tokens of a context
DECODE = Batch((1, 1, 1), (33, 5, 70))
EXTEND = Batch((7, 1, 20), (30, 17, 20))
SINKS = (0.5, -1.0, 2.0, 0.0)


def hnd_views(tokens: Tokens) -> tuple[torch.Tensor, ...]:
    """SGLang's pool is `[slots, heads, dim]`; pages and the HND order are views of it."""
    return tuple(x.permute(0, 2, 1, 3) for x in tokens.caches("NHD"))


def counter_buffer(tokens: Tokens) -> torch.Tensor:
    size = utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(16, tokens.batch.heads[0], 132)
    return torch.zeros(size, dtype=torch.uint8, device=tokens.device)


def decode_arguments(tokens: Tokens, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"out": None, "out_dtype": BF16, "kv_cache_sf": None, "kv_cache": hnd_views(tokens)}
    arguments |= {"bmm1_scale": SCALE, "bmm2_scale": 1.0, "window_left": -1, "sinks": None, "query": tokens.q}
    arguments |= {"block_tables": tokens.block_tables(MOST // tokens.batch.page_size), "seq_lens": tokens.seq_lens}
    arguments |= {"workspace_buffer": workspace(tokens.device, 32), "skip_softmax_threshold_scale_factor": None}
    arguments |= {"multi_ctas_kv_counter_buffer": counter_buffer(tokens), "max_seq_len": MOST, **changes}
    return arguments


def trtllm_decode(tokens: Tokens, **changes: Any) -> torch.Tensor:
    return decode.trtllm_batch_decode_with_kv_cache(**decode_arguments(tokens, **changes))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window_left", [-1, 20])
def test_decode(page_size: int, window_left: int, device: str) -> None:
    tokens = Tokens(Batch(DECODE.q_lens, DECODE.kv_lens, page_size=page_size), device)
    sinks = torch.tensor(SINKS, device=device)
    out = trtllm_decode(tokens, window_left=window_left, sinks=sinks)
    assert out.shape == tokens.q.shape
    assert_close(out, tokens.expected(SCALE, window_left=window_left, sinks=sinks)[0])


def test_decode_over_an_fp8_cache(device: str) -> None:
    tokens = Tokens(Batch(DECODE.q_lens, DECODE.kv_lens, kv_dtype=E4M3), device)
    out = trtllm_decode(tokens, bmm1_scale=SCALE * 0.6, bmm2_scale=1.7)
    assert_close(out, tokens.expected(SCALE * 0.6, v_scale=1.7)[0], 8e-3)


def test_decode_over_an_nvfp4_cache(device: str) -> None:
    tokens = Tokens(DECODE, device)
    data, scales, held = nvfp4_cache(tokens, "HND")
    out = trtllm_decode(tokens, kv_cache=data, kv_cache_sf=scales, bmm1_scale=SCALE * 0.002, bmm2_scale=0.003)
    assert_close(out, held.expected(SCALE)[0], 8e-3)


def test_verification(device: str) -> None:
    """As many draft tokens for every request: the mask is that of the largest batch, cut to this one."""
    tokens = Tokens(Batch((4,) * 3, (33, 4, 70)), device)
    mask = draft_mask([4], 4, True)[None].expand(9, -1, -1).contiguous().to(device)
    out = trtllm_decode(tokens, q_len_per_req=4, mask=mask[:3])
    assert_close(out.view(tokens.q.shape), tokens.expected(SCALE, causal=True)[0])


def test_verification_of_unequal_drafts(device: str) -> None:
    tokens = Tokens(Batch((4, 1, 2), (33, 5, 70)), device)
    bounds = tokens.qo_indptr.to(device)
    out = trtllm_decode(tokens, q_len_per_req=None, max_q_len=4, cum_seq_lens_q=bounds)
    assert_close(out, tokens.expected(SCALE, causal=True)[0])


def test_split_by_length(device: str) -> None:
    """Requests sorted by length in groups, each a call into a part of the output."""
    tokens = Tokens(DECODE, device)
    whole = torch.empty_like(tokens.q)
    order = torch.argsort(tokens.seq_lens)
    for indices in torch.tensor_split(order, 2):
        parts = {"query": tokens.q, "block_tables": tokens.block_tables(8), "seq_lens": tokens.seq_lens}
        group = trtllm_decode(tokens, **{name: x.index_select(0, indices) for name, x in parts.items()})
        whole.index_copy_(0, indices, group)
    assert_close(whole, tokens.expected(SCALE)[0])


def test_captured_decode(device: str) -> None:
    lengths = [(33, 5, 70), (128, 1, 1), (16, 40, 2)]
    steps = [Tokens(Batch((1,) * 3, n, num_pages=30, seed=i), device) for i, n in enumerate(lengths)]
    query, tables, lens, *cache = (x.clone() for x in held(steps[0], "HND"))
    kept = {"query": query, "block_tables": tables, "seq_lens": lens, "kv_cache": tuple(cache), "q_len_per_req": 1}
    kept |= {"workspace_buffer": workspace(device, 32), "multi_ctas_kv_counter_buffer": counter_buffer(steps[0])}
    arguments = decode_arguments(steps[0], **kept)  # made before the capture
    graph = Graph(device, lambda: decode.trtllm_batch_decode_with_kv_cache(**arguments))
    for now in steps:
        for target, source in zip((query, tables, lens, *cache), held(now, "HND"), strict=True):
            target.copy_(source)
        assert_close(graph.replay(), now.expected(SCALE)[0])


def test_block_sparse_decode_is_refused_by_name(device: str) -> None:
    """Its callers look for the keyword before they call."""
    parameters = inspect.signature(decode.trtllm_batch_decode_with_kv_cache).parameters
    assert {"enable_block_sparse_attention", "multi_ctas_kv_counter_buffer"} <= set(parameters)
    tokens = Tokens(DECODE, device)
    assert_close(trtllm_decode(tokens, enable_block_sparse_attention=False), tokens.expected(SCALE)[0])
    with pytest.raises(NotImplementedError, match="enable_block_sparse_attention"):
        trtllm_decode(tokens, enable_block_sparse_attention=True)


# ---- prefill


@pytest.mark.parametrize("causal", [True, False], ids=["", "encoder"])
def test_context(causal: bool, device: str) -> None:
    tokens, sinks = Tokens(EXTEND, device), torch.tensor(SINKS, device=device)
    out = prefill.trtllm_batch_context_with_kv_cache(
        query=tokens.q,
        kv_cache=hnd_views(tokens),
        workspace_buffer=workspace(device, 32),
        block_tables=tokens.block_tables(8),
        seq_lens=tokens.seq_lens,
        max_q_len=20,
        max_kv_len=MOST,
        bmm1_scale=SCALE,
        bmm2_scale=1.0,
        batch_size=3,
        cum_seq_lens_q=tokens.qo_indptr.to(device),
        cum_seq_lens_kv=tokens.token_indptr.to(device),
        window_left=-1,
        sinks=sinks,
        skip_softmax_threshold_scale_factor=None,
        out=None,
        out_dtype=BF16,
        kv_cache_sf=None,
        causal=causal,
    )
    assert_close(out, tokens.expected(SCALE, causal=causal, sinks=sinks)[0])


def fmha(tokens: Tokens, qkv: Any, layout: str, tables: torch.Tensor | None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"bmm1_scale": SCALE, "bmm2_scale": 1.0, "mask_mode": "causal", "window_left": -1}
    arguments |= {"out": None, "out_dtype": BF16, "sinks": None, **changes}
    return prefill.trtllm_fmha_v2_prefill(
        qkv,
        input_layout=layout,
        workspace_buffer=workspace(tokens.device, 32),
        seq_lens=tokens.seq_lens,
        max_q_len=max(tokens.batch.q_lens),
        max_kv_len=MOST,
        batch_size=len(tokens.batch.q_lens),
        cum_seq_lens_q=tokens.qo_indptr.to(tokens.device),
        cum_seq_lens_kv=tokens.token_indptr.to(tokens.device),
        block_tables=tables,
        skip_softmax_threshold_scale_factor=0.0,
        **arguments,
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("mode", "window_left"), [("causal", -1), ("causal", 9), ("padding", -1)], ids=["", "window", "encoder"]
)
def test_fmha_over_pages(layout: str, mode: str, window_left: int, device: str) -> None:
    """One tensor of pages with K and V, which share page numbers."""
    tokens, sinks = Tokens(EXTEND, device), torch.tensor(SINKS, device=device)
    qkv = (tokens.q, torch.stack(tokens.caches(layout), 1))
    out = torch.empty_like(tokens.q)
    options = {"mask_mode": mode, "window_left": window_left, "sinks": sinks, "out": out}
    found = fmha(tokens, qkv, f"Q_PAGED_KV_{layout}", tokens.block_tables(8), **options)
    assert found.data_ptr() == out.data_ptr()
    assert_close(out, tokens.expected(SCALE, causal=mode == "causal", window_left=window_left, sinks=sinks)[0])


def test_fmha_over_two_pools(device: str) -> None:
    """K and V are halves of one allocation; the tables of V count pages from the first of K."""
    tokens = Tokens(EXTEND, device)
    whole = torch.stack(tokens.caches())
    tables = tokens.block_tables(8)
    both = torch.stack((tables, tables + tokens.num_pages), 1)
    out = fmha(tokens, (tokens.q, (whole[0], whole[1])), "Q_PAGED_KV_NHD", both)
    assert_close(out, tokens.expected(SCALE, causal=True)[0])


def test_fmha_over_an_fp8_cache(device: str) -> None:
    """The query is fp8 too; scales of query, keys and values come as numbers."""
    tokens = Tokens(Batch(EXTEND.q_lens, EXTEND.kv_lens, dtype=E4M3, kv_dtype=E4M3), device)
    k, v = (x.view(torch.uint8) for x in tokens.caches())
    qkv = (tokens.q, torch.stack((k, v), 1).view(E4M3))
    out = fmha(tokens, qkv, "Q_PAGED_KV_NHD", tokens.block_tables(8), bmm1_scale=SCALE * 0.6, bmm2_scale=1.7)
    assert_close(out, tokens.expected(SCALE * 0.6, causal=True, v_scale=1.7)[0], 5e-2)


@pytest.mark.parametrize("mode", ["causal", "padding"])
def test_fmha_of_a_diffusion_model(mode: str, device: str) -> None:
    """Ragged K and V in one tensor; no threshold asks for exact attention."""
    tokens = Tokens(Batch((9, 20), (9, 20)), device)
    out = prefill.trtllm_fmha_v2_prefill(
        (tokens.q, torch.stack(tokens.ragged(), 1)),
        "CONTIGUOUS_Q_KV",
        workspace_buffer=workspace(device, 32),
        mask_mode=mode,
        seq_lens=tokens.seq_lens,
        max_q_len=20,
        max_kv_len=20,
        bmm1_scale=SCALE,
        bmm2_scale=1.0,
        batch_size=2,
        cum_seq_lens_q=ends((9, 20)).to(device),
        cum_seq_lens_kv=ends((9, 20)).to(device),
        skip_softmax_threshold_scale_factor=None,
    )
    assert_close(out, tokens.expected(SCALE, causal=mode == "causal")[0])
