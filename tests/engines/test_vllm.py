"""The calls that vLLM's FlashInfer backend makes, in its order and with its keywords: its prefill and decode wrappers.

Written after reading vLLM 0.33.0 (`v1/attention/backends/flashinfer.py`, the sparse prefill of Step5, the ragged
prefill of MLA models). The functions without a plan are in `test_functions.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    get_seq_lens,
)
from cute_attn.decode import fast_decode_plan
from tests.support.engine_case import (
    BF16,
    E4M3,
    E5M2,
    Batch,
    Graph,
    Tokens,
    assert_close,
    assert_lse,
    gpu_backend,
    host,
    merge,
    nvfp4_cache,
    workspace,
)

SCALE = 0.11
PREFILL = Batch((7, 1, 20), (30, 17, 20))
DECODE = Batch((1, 1, 1, 1), (33, 1, 16, 70))


def plan_prefill(wrapper: Any, tokens: Tokens, **changes: Any) -> None:
    """The plan of `FlashInferMetadataBuilder.build`."""
    batch = tokens.batch
    options: dict[str, Any] = {"causal": True, "window_left": -1, "logits_soft_cap": None, "o_data_type": BF16}
    options |= {"fixed_split_size": -1, "disable_split_kv": False, "kv_data_type": batch.kv_dtype, **changes}
    wrapper.plan(
        qo_indptr=host(tokens.qo_indptr),
        paged_kv_indptr=host(tokens.kv_indptr),
        paged_kv_indices=tokens.kv_indices,
        paged_kv_last_page_len=host(tokens.last_page_len),
        seq_lens=host(get_seq_lens(tokens.kv_indptr, tokens.last_page_len, batch.page_size)),
        num_qo_heads=batch.heads[0],
        num_kv_heads=batch.heads[1],
        head_dim_qk=batch.dim,
        page_size=batch.page_size,
        sm_scale=SCALE,
        q_data_type=batch.dtype,
        **options,
    )


def run_prefill(wrapper: Any, tokens: Tokens, cache: Any, **changes: Any) -> torch.Tensor:
    """The checks and the run of `FlashInferImpl.forward`. vLLM's output has room for padding."""
    assert wrapper._sm_scale == SCALE
    whole = torch.full((len(tokens.q) + 3, *tokens.q.shape[1:]), 7.0, dtype=BF16, device=tokens.device)
    out = whole[: len(tokens.q)]
    scales = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "kv_cache_sf": None, **changes}
    wrapper.run(tokens.q, cache, out=out, **scales)
    assert bool((whole[len(out) :] == 7).all())
    return out


def prefilled(tokens: Tokens, cache: Any, layout: str, plan: dict[str, Any], **run: Any) -> torch.Tensor:
    """A step of a new wrapper, whose attributes are what vLLM compares in every forward."""
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(tokens.device), layout, backend="auto")
    plan_prefill(wrapper, tokens, **plan)
    check_attributes(wrapper, plan.get("window_left", -1), plan.get("logits_soft_cap"), plan.get("causal", True))
    return run_prefill(wrapper, tokens, cache, **run)


def check_attributes(wrapper: Any, window_left: int, soft_cap: float | None, causal: bool | None) -> None:
    assert wrapper._window_left == window_left
    assert wrapper._logits_soft_cap == (soft_cap or 0.0)
    assert wrapper._sm_scale == SCALE
    assert causal is None or wrapper._causal == causal


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "draft"])
def test_prefill(layout: str, causal: bool, device: str) -> None:
    """K and V are halves of one tensor; `causal=False` is a draft model's block."""
    tokens = Tokens(PREFILL, device)
    out = prefilled(tokens, tokens.caches(layout, fused=True), layout, {"causal": causal})
    assert_close(out, tokens.expected(SCALE, causal=causal)[0])


def test_prefill_with_window_and_soft_cap(device: str) -> None:
    tokens = Tokens(PREFILL, device)
    out = prefilled(tokens, tokens.caches(fused=True), "NHD", {"window_left": 9, "logits_soft_cap": 2.0})
    assert_close(out, tokens.expected(SCALE, causal=True, window_left=9, soft_cap=2.0)[0])


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"), [(BF16, E4M3), (BF16, E5M2), (E4M3, E4M3)], ids=["e4m3-cache", "e5m2-cache", "e4m3-query"]
)
def test_prefill_over_an_fp8_cache(q_dtype: torch.dtype, kv_dtype: torch.dtype, device: str) -> None:
    """On Hopper vLLM quantises the query too; vLLM's cache is bytes, viewed as fp8."""
    tokens = Tokens(Batch(PREFILL.q_lens, PREFILL.kv_lens, dtype=q_dtype, kv_dtype=kv_dtype), device)
    cache = tuple(x.view(torch.uint8).view(kv_dtype) for x in tokens.caches("HND", fused=True))
    out = prefilled(tokens, cache, "HND", {}, q_scale=0.9, k_scale=0.6, v_scale=1.7)
    expected = tokens.expected(SCALE * 0.9 * 0.6, causal=True, v_scale=1.7)[0]
    assert_close(out, expected, 6e-3 if q_dtype == BF16 else 5e-2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill_over_an_nvfp4_cache(layout: str, device: str) -> None:
    tokens = Tokens(PREFILL, device)
    data, scales, held = nvfp4_cache(tokens, layout)
    plan = {"kv_data_type": torch.uint8}
    out = prefilled(tokens, data, layout, plan, k_scale=0.002, v_scale=0.003, kv_cache_sf=scales)
    assert_close(out, held.expected(SCALE, causal=True)[0])


@pytest.mark.parametrize("dim", [64, 256, 512])
def test_head_dimensions(dim: int, device: str) -> None:
    """All that vLLM's backend names; 512 is that of Gemma 4's global layers."""
    for batch, causal in ((PREFILL, True), (DECODE, False)):
        tokens = Tokens(dataclasses.replace(batch, dim=dim), device)
        out = (prefilled if causal else decoded)(tokens, tokens.caches(fused=True), "NHD", {})
        assert_close(out, tokens.expected(SCALE, causal=causal)[0])


def test_batch_invariant_prefill(device: str) -> None:
    """`disable_split_kv` decides, and a request's bits do not depend on the others."""
    tokens = Tokens(PREFILL, device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="auto")
    plan_prefill(wrapper, tokens, fixed_split_size=4096, disable_split_kv=True)
    cache = tokens.caches(fused=True)
    out = run_prefill(wrapper, tokens, cache).clone()
    assert_close(out, tokens.expected(SCALE, causal=True)[0])
    alone = tokens.first_request()
    plan_prefill(wrapper, alone, fixed_split_size=4096, disable_split_kv=True)
    assert torch.equal(run_prefill(wrapper, alone, cache), out[: len(alone.q)])


# ---- sinks: gpt-oss


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=["", "e4m3-cache"])
@pytest.mark.parametrize(("window_left", "causal"), [(-1, True), (11, True), (-1, False)])
def test_prefill_with_sinks(window_left: int, causal: bool, kv_dtype: torch.dtype, device: str) -> None:
    """Scales of query and keys are part of the scale that follows the sinks."""
    batch, layout = dataclasses.replace(PREFILL, kv_dtype=kv_dtype), "NHD" if kv_dtype == BF16 else "HND"
    tokens, sinks = Tokens(batch, device), torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    wrapper = cute_attn.BatchAttentionWithAttentionSinkWrapper(
        workspace(device),
        layout,
        backend="auto",
        q_data_type=BF16,
        kv_data_type=kv_dtype,
        head_dim_qk=batch.dim,
        head_dim_vo=batch.dim,
        window_left=window_left,
    )
    assert isinstance(wrapper, BatchPrefillWithPagedKVCacheWrapper)
    plan_prefill(wrapper, tokens, causal=causal, window_left=window_left)
    check_attributes(wrapper, window_left, None, causal)
    out = torch.empty_like(tokens.q)
    wrapper.run(tokens.q, tokens.caches(layout, fused=True), sinks, SCALE * 0.7, v_scale=1.5, out=out)
    expected = tokens.expected(SCALE * 0.7, causal=causal, window_left=window_left, sinks=sinks, v_scale=1.5)[0]
    assert_close(out, expected)


# ---- decode


def plan_decode(wrapper: Any, tokens: Tokens, **changes: Any) -> None:
    """A whole plan at first and without graphs; for a captured wrapper then `fast_decode_plan`."""
    batch = tokens.batch
    options: dict[str, Any] = {
        "indptr": host(tokens.kv_indptr),
        "indices": tokens.kv_indices,
        "last_page_len": host(tokens.last_page_len),
        "num_qo_heads": batch.heads[0],
        "num_kv_heads": batch.heads[1],
        "head_dim": batch.dim,
        "page_size": batch.page_size,
        "pos_encoding_mode": "NONE",
        "window_left": -1,
        "logits_soft_cap": None,
        "q_data_type": batch.dtype,
        "kv_data_type": batch.kv_dtype,
        "data_type": None,
        "sm_scale": SCALE,
        "rope_scale": None,
        "rope_theta": None,
        "non_blocking": True,
        "fixed_split_size": -1,
        "disable_split_kv": False,
        "q_len_per_req": batch.q_lens[0],
        **changes,
    }
    if not wrapper.is_cuda_graph_enabled or getattr(wrapper, "vllm_first_call", True):
        seq_lens = host(get_seq_lens(tokens.kv_indptr, tokens.last_page_len, batch.page_size))
        wrapper.plan(**options, o_data_type=BF16, block_tables=None, seq_lens=seq_lens)
        wrapper.vllm_first_call = False
    else:
        fast_decode_plan(wrapper, **options)


def decode_wrapper(device: str, layout: str, backend: str = "auto", buffers: tuple[Any, ...] = (None,) * 3) -> Any:
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace(device),
        layout,
        use_cuda_graph=buffers[0] is not None,
        paged_kv_indptr_buffer=buffers[0],
        paged_kv_indices_buffer=buffers[1],
        paged_kv_last_page_len_buffer=buffers[2],
        use_tensor_cores=True,
        backend=backend,
    )


def decoded(tokens: Tokens, cache: Any, layout: str, plan: dict[str, Any], **run: Any) -> torch.Tensor:
    """A step of a new wrapper without graphs."""
    wrapper = decode_wrapper(tokens.device, layout)
    plan_decode(wrapper, tokens, **plan)
    check_attributes(wrapper, plan.get("window_left", -1), plan.get("logits_soft_cap"), None)
    return run_decode(wrapper, tokens, cache, **run)


def run_decode(wrapper: Any, tokens: Tokens, cache: Any, **changes: Any) -> torch.Tensor:
    out = torch.empty_like(tokens.q, dtype=BF16)
    arguments = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "kv_cache_sf": None, "sinks": None, **changes}
    wrapper.run(tokens.q, cache, out=out, **arguments)
    return out


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_decode(layout: str, with_sinks: bool, device: str) -> None:
    tokens = Tokens(DECODE, device)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device) if with_sinks else None
    out = decoded(tokens, tokens.caches(layout, fused=True), layout, {"window_left": 40}, sinks=sinks)
    assert_close(out, tokens.expected(SCALE, window_left=40, sinks=sinks)[0])


def test_decode_with_soft_cap(device: str) -> None:
    tokens = Tokens(DECODE, device)
    out = decoded(tokens, tokens.caches(fused=True), "NHD", {"logits_soft_cap": 2.0})
    assert_close(out, tokens.expected(SCALE, soft_cap=2.0)[0])


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_decode_over_an_fp8_cache(kv_dtype: torch.dtype, device: str) -> None:
    tokens = Tokens(Batch(DECODE.q_lens, DECODE.kv_lens, kv_dtype=kv_dtype), device)
    cache = tokens.caches("HND", fused=True)
    out = decoded(tokens, cache, "HND", {}, q_scale=0.9, k_scale=0.6, v_scale=1.7)
    assert_close(out, tokens.expected(SCALE * 0.9 * 0.6, v_scale=1.7)[0])


def test_decode_over_an_nvfp4_cache(device: str) -> None:
    tokens = Tokens(DECODE, device)
    data, scales, held = nvfp4_cache(tokens, "NHD")
    plan = {"kv_data_type": torch.uint8}
    out = decoded(tokens, data, "NHD", plan, k_scale=0.002, v_scale=0.003, kv_cache_sf=scales)
    assert_close(out, held.expected(SCALE)[0])


def test_decode_of_several_tokens(device: str) -> None:
    """Speculative decoding on fa2: as many tokens for every request, causal among themselves."""
    tokens = Tokens(Batch((3, 3, 3), (33, 3, 70)), device)
    wrapper = decode_wrapper(device, "NHD", gpu_backend(device, "fa2"))
    plan_decode(wrapper, tokens)
    out = run_decode(wrapper, tokens, tokens.caches(fused=True))
    assert_close(out, tokens.expected(SCALE, causal=True)[0])


GRAPHS = [
    pytest.param(1, {}, BF16, id="bf16"),
    pytest.param(1, {}, E4M3, id="e4m3-cache"),
    pytest.param(2, {}, BF16, id="two-tokens"),
    pytest.param(1, {"fixed_split_size": 2048, "disable_split_kv": True}, BF16, id="batch-invariant"),
]


@pytest.mark.parametrize(("q_len", "options", "kv_dtype"), GRAPHS)
def test_captured_decode(q_len: int, options: dict[str, Any], kv_dtype: torch.dtype, device: str) -> None:
    """One wrapper for each batch size; its index buffers are slices of the builder's, where padding has no keys."""
    padding = 0 if q_len == 1 else q_len
    lengths = [(33, 1 + q_len, 16, 70), (5, 64, 2, 100), (90, 7, padding, padding), (128, 128, 128, 128)]
    cases = [Batch((q_len,) * 4, kv_lens, kv_dtype=kv_dtype, num_pages=40, seed=i) for i, kv_lens in enumerate(lengths)]
    tokens = [Tokens(case, device) for case in cases]
    indptr, last = (torch.zeros(32, dtype=torch.int32, device=device) for _ in range(2))
    indices = torch.zeros(200, dtype=torch.int32, device=device)
    wrapper = decode_wrapper(
        device, "NHD", gpu_backend(device, "fa2") if q_len > 1 else "auto", (indptr[:5], indices, last[:4])
    )
    q = torch.zeros_like(tokens[0].q)
    whole = torch.cat([torch.zeros_like(x) for x in tokens[0].caches()], -1)
    cache = whole.split(cases[0].dim, -1)
    out = torch.empty_like(q)

    def run() -> torch.Tensor:
        arguments = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "kv_cache_sf": None, "sinks": None}
        wrapper.run(q, cache, out=out, **arguments)
        return out

    plan_decode(wrapper, tokens[0], **options)
    graph = Graph(device, run)
    for now in tokens:
        q.copy_(now.q)
        for target, source in zip(cache, now.caches(), strict=True):
            target.copy_(source)
        out.fill_(7.0)
        # The builder has written the page numbers into the wrapper's buffer itself.
        indices[: len(now.kv_indices)].copy_(now.kv_indices)
        now.kv_indices = indices[: len(now.kv_indices)]
        plan_decode(wrapper, now, **options)
        found = graph.replay()
        assert_close(found, now.expected(SCALE, causal=q_len > 1)[0])


# ---- decode context parallelism


def test_decode_over_shards_of_the_keys(device: str) -> None:
    tokens, parts = Tokens(DECODE, device), []
    for rank in range(2):
        shard = tokens.shard(rank, 2)
        wrapper = decode_wrapper(device, "NHD")
        plan_decode(wrapper, shard)
        lse = torch.empty(shard.q.shape[:2], dtype=torch.float32, device=device)
        out = torch.empty_like(shard.q)
        wrapper.run(
            shard.q,
            shard.caches(fused=True),
            q_scale=1.0,
            k_scale=1.0,
            v_scale=1.0,
            out=out,
            lse=lse,
            return_lse=True,
            kv_cache_sf=None,
            sinks=None,
        )
        parts.append((out, lse))
    out, lse = merge(parts)
    expected = tokens.expected(SCALE)
    assert_close(out, expected[0])
    assert_lse(lse.float(), expected[1])


def test_prefill_over_shards_of_the_keys(device: str) -> None:
    """Two passes: new tokens over the shards of the context, not causal, and over themselves."""
    whole = Tokens(Batch((7, 3), (30, 21)), device)
    context = [n - m for n, m in zip(whole.batch.kv_lens, whole.batch.q_lens, strict=True)]
    past = Tokens(Batch((7, 3), context), device, *([x[:n] for x, n in zip(parts, context, strict=True)]
                  for parts in (whole.keys, whole.values)))  # fmt: skip
    past.q, past.queries = whole.q, whole.queries
    parts = []
    for rank in range(2):
        shard = past.shard(rank, 2)
        native = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "HND")
        plan_prefill(native, shard, causal=False, o_data_type=None, block_tables=shard.block_tables())
        check_attributes(native, -1, None, False)
        cache = shard.caches("HND", fused=True)
        parts.append(native.run(whole.q, cache, k_scale=1.0, v_scale=1.0, return_lse=True))
    new = BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    new.plan(
        qo_indptr=host(whole.qo_indptr),
        kv_indptr=host(whole.qo_indptr),
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=128,
        head_dim_vo=128,
        causal=True,
        sm_scale=SCALE,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type=BF16,
    )
    check_attributes(new, -1, None, True)
    pairs = zip((whole.keys, whole.values), (past.keys, past.values), strict=True)
    key, value = (torch.cat([x[len(y) :] for x, y in zip(*pair, strict=True)]).to(BF16).to(device) for pair in pairs)
    parts.append(new.run(whole.q, key, value, return_lse=True))
    assert_close(merge(parts)[0], whole.expected(SCALE, causal=True)[0])


# ---- other callers of the prefill wrappers


def test_compact_sparse_prefill(device: str) -> None:
    """Step5: every query token is a request of its own over 8-token pages; exact lengths follow on the device."""
    tokens = Tokens(Batch((1,) * 5, (9, 24, 3, 16, 40), heads=(4, 1), page_size=8), device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend=gpu_backend(device, "fa2"))
    wrapper.plan(
        host(torch.arange(6, dtype=torch.int32)),
        host(tokens.kv_indptr),
        tokens.kv_indices,
        host(tokens.last_page_len),
        4,
        1,
        128,
        8,
        head_dim_vo=128,
        causal=False,
        sm_scale=SCALE,
        q_data_type=BF16,
        kv_data_type=BF16,
        disable_split_kv=True,
        max_token_per_sequence=1,
    )
    wrapper._paged_kv_indptr_buf.copy_(tokens.kv_indptr.to(device))
    wrapper._paged_kv_last_page_len_buf.copy_(tokens.last_page_len.to(device))
    out = torch.empty_like(tokens.q)
    wrapper.run(tokens.q, tokens.caches(fused=True), out=out)
    assert_close(out, tokens.expected(SCALE)[0])


def test_ragged_prefill_of_mla(device: str) -> None:
    """Decompressed keys of 192 and values of 128: new tokens, then a chunk of the context."""
    new = Tokens(Batch((9, 4), (9, 4), heads=(4, 4), dim=192, dim_vo=128), device)
    chunk = Tokens(Batch((9, 4), (30, 0), heads=(4, 4), dim=192, dim_vo=128, seed=1), device)
    chunk.q, chunk.queries = new.q, new.queries
    results = []
    for tokens, causal in ((new, True), (chunk, False)):
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", backend="auto")
        wrapper.plan(
            qo_indptr=tokens.qo_indptr.to(device),
            kv_indptr=tokens.token_indptr.to(device),
            num_qo_heads=4,
            num_kv_heads=4,
            head_dim_qk=192,
            head_dim_vo=128,
            causal=causal,
            sm_scale=SCALE,
            window_left=-1,
            logits_soft_cap=None,
            q_data_type=BF16,
            o_data_type=BF16,
        )
        k, v = tokens.ragged()
        results.append(wrapper.run(q=tokens.q, k=k, v=v, out=None, return_lse=True))
    for (out, lse), tokens, causal in zip(results, (new, chunk), (True, False), strict=True):
        expected = tokens.expected(SCALE, causal=causal)
        assert_close(out, expected[0])
        assert_lse(lse, expected[1])
