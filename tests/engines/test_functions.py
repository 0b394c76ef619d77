"""The functions without a plan that vLLM 0.33.0 and SGLang 0.5.23 call: XQA, TRT-LLM's, and Hopper's FMHA.

Written after reading vLLM's `v1/attention/backends/flashinfer.py` and SGLang's `srt/layers/attention/
trtllm_mha_backend.py`. Workspaces are zeroed and shared; lengths and block tables are on the device. Ragged keys,
latent attention's too, and two pools: `tests/api/test_trtllm_prefill.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from cute_attn import decode, prefill, utils
from tests.support.engine_case import (
    BF16,
    E4M3,
    Batch,
    Graph,
    Tokens,
    assert_close,
    assert_lse,
    draft_mask,
    nvfp4_cache,
    workspace,
)

SCALE = 0.11
MOST = 128  # tokens of a context
DECODE = Batch((1, 1, 1), (33, 5, 70))
EXTEND = Batch((7, 1, 20), (30, 17, 20))
SINKS = (0.5, -1.0, 2.0, 0.0)


def counter_buffer(tokens: Tokens, most_tokens: int = 64) -> torch.Tensor:
    """The buffer that engines allocate per layer, for their largest batch."""
    sms = utils.get_device_sm_count(torch.device("cuda")) if tokens.device == "cuda" else 132
    size = utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(most_tokens, tokens.batch.heads[0], sms)
    assert size == 4 * -(-max(most_tokens * tokens.batch.heads[0], sms) // 8) * 8
    return torch.zeros(size, dtype=torch.uint8, device=tokens.device)


# ---- decode


class Engine(NamedTuple):
    """A decode function as an engine calls it."""

    function: Callable[..., Any]
    layout: str
    options: Callable[[Tokens], dict[str, Any]]  # beside those that all calls have
    drafts: Callable[[Tokens, bool], dict[str, Any]]  # of requests with several query tokens; causal or not

    def arguments(self, tokens: Tokens, **changes: Any) -> dict[str, Any]:
        common: dict[str, Any] = {"bmm1_scale": SCALE, "bmm2_scale": 1.0, "window_left": -1, "sinks": None}
        common |= {"block_tables": tokens.block_tables(8), "seq_lens": tokens.seq_lens, "max_seq_len": MOST}
        common |= {"query": tokens.q, "kv_cache": tokens.caches(self.layout, fused=True), "kv_cache_sf": None}
        return {**common, "workspace_buffer": workspace(tokens.device, 32), **self.options(tokens), **changes}

    def __call__(self, tokens: Tokens, **changes: Any) -> Any:
        arguments = self.arguments(tokens, **changes)
        found = self.function(**arguments)
        assert arguments["out"] is None or arguments["out"] is (found[0] if isinstance(found, tuple) else found)
        return found


def vllm_xqa(layout: str) -> Engine:
    def options(tokens: Tokens) -> dict[str, Any]:
        given = {"q_len_per_req": 1, "mask": None, "q_cu_seq_lens": None, "kv_layout": layout}
        return {**given, "out": torch.empty_like(tokens.q, dtype=BF16)}

    def drafts(tokens: Tokens, causal: bool) -> dict[str, Any]:
        """Of equal drafts the builder's mask, of which requests have a slice."""
        q_lens, device = tokens.batch.q_lens, tokens.device
        if len(set(q_lens)) > 1:
            mask = draft_mask(q_lens, max(q_lens), causal).to(device)
            return {"q_len_per_req": max(q_lens), "mask": mask, "q_cu_seq_lens": tokens.qo_indptr.to(device)}
        one = draft_mask(q_lens[:1], q_lens[0], causal)
        mask = one[None].expand(8, -1, -1).contiguous().to(device)[: len(q_lens)]
        return {"q_len_per_req": q_lens[0], "mask": mask}

    return Engine(decode.xqa_batch_decode_with_kv_cache, layout, options, drafts)


def vllm_trtllm(tokens: Tokens) -> dict[str, Any]:
    """vLLM calls it on Blackwell."""
    given = {"q_len_per_req": 1, "max_q_len": None, "cum_seq_lens_q": None, "lse": None, "return_lse": False}
    given |= {"out": torch.empty_like(tokens.q, dtype=BF16), "o_sf_scale": None, "kv_layout": "HND"}
    return {**given, "backend": "trtllm-gen", "multi_ctas_kv_counter_buffer": counter_buffer(tokens)}


def sglang_trtllm(tokens: Tokens) -> dict[str, Any]:
    """The pool is `[slots, heads, dim]`; pages and the HND order, the function's default, are views of it."""
    given = {"out": None, "out_dtype": BF16, "skip_softmax_threshold_scale_factor": None}
    views = tuple(x.permute(0, 2, 1, 3) for x in tokens.caches("NHD"))
    return {**given, "kv_cache": views, "multi_ctas_kv_counter_buffer": counter_buffer(tokens, 16)}


def trtllm_drafts(tokens: Tokens, causal: bool) -> dict[str, Any]:
    q_lens = tokens.batch.q_lens
    if len(set(q_lens)) > 1:
        return {"q_len_per_req": None, "max_q_len": max(q_lens), "cum_seq_lens_q": tokens.qo_indptr.to(tokens.device)}
    return {"q_len_per_req": q_lens[0]}


def sglang_drafts(tokens: Tokens, causal: bool) -> dict[str, Any]:
    """The mask of equal drafts is that of the largest batch, cut to this one."""
    equal = len(set(tokens.batch.q_lens)) == 1
    mask = {"mask": vllm_xqa("HND").drafts(tokens, causal)["mask"]} if equal else {}
    return trtllm_drafts(tokens, causal) | mask


TRTLLM = decode.trtllm_batch_decode_with_kv_cache
VLLM, SGLANG = Engine(TRTLLM, "HND", vllm_trtllm, trtllm_drafts), Engine(TRTLLM, "HND", sglang_trtllm, sglang_drafts)
XQA = {f"vllm-xqa-{layout}": vllm_xqa(layout) for layout in ("NHD", "HND")}
ENGINES = {**XQA, "vllm-trtllm": VLLM, "sglang-trtllm": SGLANG}
EVERY = pytest.mark.parametrize("name", ENGINES)


@EVERY
@pytest.mark.parametrize(
    ("page_size", "window_left", "dtype"), [(16, -1, BF16), (16, 20, BF16), (64, 20, BF16), (16, -1, E4M3)]
)
def test_decode(name: str, page_size: int, window_left: int, dtype: torch.dtype, device: str) -> None:
    """Of an fp8 cache, the scale of keys is part of bmm1_scale, that of values bmm2_scale."""
    tokens = Tokens(dataclasses.replace(DECODE, page_size=page_size, kv_dtype=dtype), device)
    mask = {"window_left": window_left, "sinks": torch.tensor(SINKS, device=device)}
    scale, v_scale, error = (SCALE, 1.0, 6e-3) if dtype == BF16 else (SCALE * 0.6, 1.7, 8e-3)
    out = ENGINES[name](tokens, bmm1_scale=scale, bmm2_scale=v_scale, **mask)
    assert out.shape == tokens.q.shape
    assert_close(out, tokens.expected(scale, v_scale=v_scale, **mask)[0], error)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "vllm-trtllm"])  # whose scales are interleaved
def test_decode_over_an_nvfp4_cache(name: str, device: str) -> None:
    tokens = Tokens(DECODE, device)
    data, scales, held = nvfp4_cache(tokens, ENGINES[name].layout)
    out = ENGINES[name](tokens, kv_cache=data, kv_cache_sf=scales, bmm1_scale=SCALE * 0.002, bmm2_scale=0.003)
    assert_close(out, held.expected(SCALE)[0], 8e-3)


@pytest.mark.parametrize(("name", "causal"), [*((name, True) for name in ENGINES), *((name, False) for name in XQA)])
@pytest.mark.parametrize("q_lens", [(3, 3, 3), (35, 35, 35), (4, 1, 2), (4, 1, 0, 2)])
def test_verification(name: str, causal: bool, q_lens: tuple[int, ...], device: str) -> None:
    """As many drafts for every request, or not; a graph's padding leaves requests without tokens. Not causal: a block
    of a draft model, which XQA alone has.
    """
    tokens = Tokens(Batch(q_lens, (40, 35, 1, 75) if len(q_lens) > 3 else (40, 35, 75)), device)
    out = ENGINES[name](tokens, **ENGINES[name].drafts(tokens, causal))
    keep = None if causal else [torch.ones(q, n) for q, n in zip(q_lens, tokens.batch.kv_lens, strict=True)]
    assert_close(out.view(tokens.q.shape), tokens.expected(SCALE, causal=True, keep=keep)[0])


@EVERY
def test_captured_decode(name: str, device: str) -> None:
    """Lengths, tables and tokens change in place; padded requests have no keys."""

    def held(tokens: Tokens) -> tuple[torch.Tensor, ...]:
        return tokens.q, tokens.block_tables(8), tokens.seq_lens, *tokens.caches(ENGINES[name].layout)

    lengths = [(33, 5, 70), (128, 1, 0), (16, 0, 0), (100, 90, 80)]
    steps = [Tokens(Batch((1,) * 3, n, num_pages=30, seed=i), device) for i, n in enumerate(lengths)]
    query, tables, lens, *cache = (x.clone() for x in held(steps[0]))
    kept = {"query": query, "block_tables": tables, "seq_lens": lens, "kv_cache": tuple(cache)}
    arguments = ENGINES[name].arguments(steps[0], **kept)  # made before the capture
    graph = Graph(device, lambda: ENGINES[name].function(**arguments))
    for now in steps:
        for target, source in zip((query, tables, lens, *cache), held(now), strict=True):
            target.copy_(source)
        graph.result.fill_(7.0)
        assert_close(graph.replay(), now.expected(SCALE)[0])


def test_decode_over_shards_of_the_keys(device: str) -> None:
    """Each is right by itself: engines merge them, as `test_vllm` does."""
    tokens, sinks = Tokens(DECODE, device), torch.tensor(SINKS, device=device)
    for rank in range(2):
        shard = tokens.shard(rank, 2)
        lse = torch.empty(shard.q.shape[:2], dtype=torch.float32, device=device)
        found = VLLM(shard, lse=lse, return_lse=True, sinks=sinks, bmm2_scale=1.5)
        assert found[1] is lse
        expected = shard.expected(SCALE, sinks=sinks, v_scale=1.5)
        assert_close(found[0], expected[0])
        assert_lse(lse, expected[1])


# ---- prefill


def where(tokens: Tokens, token_bounds: bool) -> dict[str, Any]:
    """Lengths of a call. `token_bounds`: of keys, instead of those of pages."""
    bounds = tokens.token_indptr if token_bounds else tokens.kv_indptr
    lengths = {"seq_lens": tokens.seq_lens, "max_q_len": max(tokens.batch.q_lens), "max_kv_len": MOST}
    lengths |= {"batch_size": len(tokens.batch.q_lens), "cum_seq_lens_kv": bounds.to(tokens.device)}
    return lengths | {
        "cum_seq_lens_q": tokens.qo_indptr.to(tokens.device),
        "workspace_buffer": workspace(tokens.device, 32),
    }


def context(tokens: Tokens, token_bounds: bool, **options: Any) -> Any:
    scales = {"bmm1_scale": SCALE, "bmm2_scale": 1.0, "window_left": -1}
    tables = {"kv_cache": tokens.caches("HND", fused=True), "block_tables": tokens.block_tables(8)}
    given = {**where(tokens, token_bounds), **scales, **tables, **options}
    return prefill.trtllm_batch_context_with_kv_cache(query=tokens.q, **given)


@pytest.mark.parametrize("changed", [{}, {"window_left": 9}, {"causal": False}], ids=["", "window", "encoder"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_context(engine: str, changed: dict[str, Any], device: str) -> None:
    tokens, sinks = Tokens(EXTEND, device), torch.tensor(SINKS, device=device)
    out = torch.empty_like(tokens.q) if engine == "vllm" else None
    more = {"o_sf_scale": None, "multi_ctas_kv_counter_buffer": counter_buffer(tokens)}
    if engine == "sglang":
        more = {"out_dtype": BF16, "skip_softmax_threshold_scale_factor": None, "causal": True}
        more["kv_cache"] = sglang_trtllm(tokens)["kv_cache"]
    given = {"sinks": sinks, "out": out, "kv_cache_sf": None, **more, **changed}
    found = context(tokens, engine == "sglang", **given)
    assert out is None or found is out
    assert_close(found, tokens.expected(SCALE, sinks=sinks, **{"causal": True, **changed})[0])


def fmha(tokens: Tokens, qkv: Any, layout: str, tables: torch.Tensor | None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"bmm1_scale": SCALE, "bmm2_scale": 1.0, "mask_mode": "causal", "window_left": -1}
    arguments |= {"out": None, "out_dtype": BF16, "sinks": None, "block_tables": tables, **where(tokens, True)}
    threshold = {"skip_softmax_threshold_scale_factor": 0.0}
    return prefill.trtllm_fmha_v2_prefill(qkv, input_layout=layout, **{**arguments, **threshold, **changes})


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


def test_fmha_over_an_fp8_cache(device: str) -> None:
    """The query is fp8 too; scales of query, keys and values come as numbers."""
    tokens = Tokens(dataclasses.replace(EXTEND, dtype=E4M3, kv_dtype=E4M3), device)
    k, v = (x.view(torch.uint8) for x in tokens.caches())
    qkv = (tokens.q, torch.stack((k, v), 1).view(E4M3))
    out = fmha(tokens, qkv, "Q_PAGED_KV_NHD", tokens.block_tables(8), bmm1_scale=SCALE * 0.6, bmm2_scale=1.7)
    assert_close(out, tokens.expected(SCALE * 0.6, causal=True, v_scale=1.7)[0], 5e-2)
