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
from cute_attn import get_seq_lens
from cute_attn.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from cute_attn.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
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


def planned_options(tokens: Tokens, paged: str = "") -> dict[str, Any]:
    """What plans of prefill and decode are given alike. `paged`: before the names of arrays of pages."""
    batch = tokens.batch
    arrays = {"indptr": host(tokens.kv_indptr), "indices": tokens.kv_indices}
    arrays |= {"last_page_len": host(tokens.last_page_len)}
    sizes = {"num_qo_heads": batch.heads[0], "num_kv_heads": batch.heads[1], "page_size": batch.page_size}
    numbers = {"sm_scale": SCALE, "window_left": -1, "logits_soft_cap": None, "fixed_split_size": -1}
    dtypes = {"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype}
    options = {**sizes, **numbers, **dtypes, "disable_split_kv": False}
    return options | {paged + name: x for name, x in arrays.items()}


def seq_lens(tokens: Tokens) -> torch.Tensor:
    return host(get_seq_lens(tokens.kv_indptr, tokens.last_page_len, tokens.batch.page_size))


def plan_prefill(wrapper: Any, tokens: Tokens, **changes: Any) -> None:
    """The plan of `FlashInferMetadataBuilder.build`."""
    own = {"qo_indptr": host(tokens.qo_indptr), "seq_lens": seq_lens(tokens), "head_dim_qk": tokens.batch.dim}
    options = {**planned_options(tokens, "paged_kv_"), **own, "o_data_type": BF16, "causal": True}
    wrapper.plan(**options | changes)


def run_prefill(wrapper: Any, tokens: Tokens, cache: Any, **changes: Any) -> torch.Tensor:
    """The checks and the run of `FlashInferImpl.forward`. vLLM's output has room for padding."""
    assert wrapper._sm_scale == SCALE
    whole = torch.full((len(tokens.q) + 3, *tokens.q.shape[1:]), 7.0, dtype=BF16, device=tokens.device)
    out = whole[: len(tokens.q)]
    scales = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "kv_cache_sf": None, **changes}
    wrapper.run(tokens.q, cache, out=out, **scales)
    assert bool((whole[len(out) :] == 7).all())
    return out


def check_attributes(wrapper: Any, window_left: int, soft_cap: float | None, causal: bool | None) -> None:
    assert wrapper._window_left == window_left
    assert wrapper._logits_soft_cap == (soft_cap or 0.0)
    assert wrapper._sm_scale == SCALE
    assert causal is None or wrapper._causal == causal


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
    own = {"head_dim": tokens.batch.dim, "pos_encoding_mode": "NONE", "data_type": None, "non_blocking": True}
    own |= {"rope_scale": None, "rope_theta": None, "q_len_per_req": tokens.batch.q_lens[0]}
    options = {**planned_options(tokens), **own, **changes}
    if not wrapper.is_cuda_graph_enabled or getattr(wrapper, "vllm_first_call", True):
        wrapper.plan(**options, o_data_type=BF16, block_tables=None, seq_lens=seq_lens(tokens))
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


RUN = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "kv_cache_sf": None, "sinks": None}


def run_decode(wrapper: Any, tokens: Tokens, cache: Any, **changes: Any) -> torch.Tensor:
    out = torch.empty_like(tokens.q, dtype=BF16)
    wrapper.run(tokens.q, cache, out=out, **{**RUN, **changes})
    return out


@dataclasses.dataclass(frozen=True)
class Step:
    """A batch of new prefills or decodes, the layout of its cache, and options of its plan and its run."""

    batch: Batch
    layout: str = "NHD"
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: float = 6e-3


def stored(batch: Batch, dtype: torch.dtype, q_dtype: torch.dtype = BF16) -> Batch:
    return dataclasses.replace(batch, dtype=q_dtype, kv_dtype=dtype)


FP8_SCALES = {"q_scale": 0.9, "k_scale": 0.6, "v_scale": 1.7}
NVFP4 = {"plan": {"kv_data_type": torch.uint8}, "run": {"k_scale": 0.002, "v_scale": 0.003}}
DRAFT = {"causal": False}  # a draft model's block
STEPS = {
    **{f"prefill-{layout}": Step(PREFILL, layout) for layout in ("NHD", "HND")},
    **{f"prefill-draft-{layout}": Step(PREFILL, layout, DRAFT) for layout in ("NHD", "HND")},
    "prefill-window-cap": Step(PREFILL, plan={"window_left": 9, "logits_soft_cap": 2.0}),
    "prefill-e4m3": Step(stored(PREFILL, E4M3), "HND", run=FP8_SCALES),
    "prefill-e5m2": Step(stored(PREFILL, E5M2), "HND", run=FP8_SCALES),
    "prefill-e4m3-query": Step(stored(PREFILL, E4M3, E4M3), "HND", run=FP8_SCALES, error=5e-2),  # on Hopper
    **{f"prefill-nvfp4-{layout}": Step(PREFILL, layout, **NVFP4) for layout in ("NHD", "HND")},
    **{f"decode-window-{layout}": Step(DECODE, layout, {"window_left": 40}) for layout in ("NHD", "HND")},
    "decode-sinks": Step(DECODE, plan={"window_left": 40}, run={"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    "decode-cap": Step(DECODE, plan={"logits_soft_cap": 2.0}),
    "decode-e4m3": Step(stored(DECODE, E4M3), "HND", run=FP8_SCALES),
    "decode-e5m2": Step(stored(DECODE, E5M2), "HND", run=FP8_SCALES),
    "decode-nvfp4": Step(DECODE, **NVFP4),
    "decode-drafts": Step(Batch((3, 3, 3), (33, 3, 70))),  # as many for every request, causal among themselves
    # All head dimensions that vLLM's backend names; 512 is that of Gemma 4's global layers.
    **{f"prefill-{dim}": Step(dataclasses.replace(PREFILL, dim=dim)) for dim in (64, 256, 512)},
    **{f"decode-{dim}": Step(dataclasses.replace(DECODE, dim=dim)) for dim in (64, 256, 512)},
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, device: str) -> None:
    """K and V are halves of one tensor, of bytes viewed as fp8. Attributes are what vLLM compares in every forward."""
    batch, layout, plan = STEPS[name].batch, STEPS[name].layout, STEPS[name].plan
    tokens, decodes = Tokens(batch, device), name.startswith("decode")
    run = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in STEPS[name].run.items()}
    held, options = tokens, {**plan, **run}
    if "nvfp4" in name:  # whose scales are part of what the cache holds
        cache, run["kv_cache_sf"], held = nvfp4_cache(tokens, layout)
        options = {}
    else:
        cache = tuple(x.view(torch.uint8).view(batch.kv_dtype) for x in tokens.caches(layout, fused=True))
    of_prefill = BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout, backend="auto")
    wrapper = decode_wrapper(device, layout) if decodes else of_prefill
    (plan_decode if decodes else plan_prefill)(wrapper, tokens, **plan)
    causal = None if decodes else plan.get("causal", True)
    check_attributes(wrapper, plan.get("window_left", -1), plan.get("logits_soft_cap"), causal)
    out = (run_decode if decodes else run_prefill)(wrapper, tokens, cache, **run)
    assert_close(out, held.solved(**{"sm_scale": SCALE, "causal": True, **options}), STEPS[name].error)


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
        wrapper.run(q, cache, out=out, **RUN)
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
        wrapper.run(shard.q, shard.caches(fused=True), out=out, lse=lse, return_lse=True, **RUN)
        parts.append((out, lse))
    out, lse = merge(parts)
    expected = tokens.expected(SCALE)
    assert_close(out, expected[0])
    assert_lse(lse.float(), expected[1])


def planned_ragged(tokens: Tokens, causal: bool, **changes: Any) -> Any:
    heads, dim = tokens.batch.heads, tokens.batch.dim
    options: dict[str, Any] = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim_qk": dim, "causal": causal}
    options |= {"head_dim_vo": tokens.batch.dim_vo or dim, "sm_scale": SCALE, "window_left": -1}
    bounds = {"qo_indptr": host(tokens.qo_indptr), "kv_indptr": host(tokens.token_indptr), "logits_soft_cap": None}
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(tokens.device), "NHD", backend="auto")
    wrapper.plan(**{**options, **bounds, "q_data_type": BF16, **changes})
    return wrapper


def test_prefill_over_shards_of_the_keys(device: str) -> None:
    """Two passes: new tokens over the shards of the context, not causal, and over themselves."""
    whole = Tokens(Batch((7, 3), (30, 21)), device)
    (past, new), parts = whole.split(), []
    for rank in range(2):
        shard = past.shard(rank, 2)
        native = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "HND")
        plan_prefill(native, shard, causal=False, o_data_type=None, block_tables=shard.block_tables())
        check_attributes(native, -1, None, False)
        cache = shard.caches("HND", fused=True)
        parts.append(native.run(whole.q, cache, k_scale=1.0, v_scale=1.0, return_lse=True))
    ragged = planned_ragged(new, causal=True)
    check_attributes(ragged, -1, None, True)
    parts.append(ragged.run(whole.q, *new.ragged(), return_lse=True))
    assert_close(merge(parts)[0], whole.expected(SCALE, causal=True)[0])


# ---- other callers of the prefill wrappers


def test_compact_sparse_prefill(device: str) -> None:
    """Step5: every query token is a request of its own over 8-token pages. The plan has bounds of the lengths: 5 full
    pages each; exact ones follow on the device.
    """
    tokens = Tokens(Batch((1,) * 5, (9, 24, 3, 16, 40), heads=(4, 1), page_size=8), device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend=gpu_backend(device, "fa2"))
    bounds = {
        "paged_kv_indptr": host(torch.arange(0, 30, 5, dtype=torch.int32)),
        "paged_kv_indices": torch.nn.functional.pad(tokens.kv_indices, (0, 25 - len(tokens.kv_indices))),
        "paged_kv_last_page_len": host(torch.full((5,), 8, dtype=torch.int32)),
        "seq_lens": None,
    }
    plan_prefill(wrapper, tokens, **bounds, causal=False, disable_split_kv=True, max_token_per_sequence=1)
    wrapper._paged_kv_indptr_buf.copy_(tokens.kv_indptr.to(device))
    wrapper._paged_kv_last_page_len_buf.copy_(tokens.last_page_len.to(device))
    out = torch.empty_like(tokens.q)
    wrapper.run(tokens.q, tokens.caches(fused=True), out=out)
    assert_close(out, tokens.expected(SCALE)[0])


def test_ragged_prefill_of_mla(device: str) -> None:
    """Decompressed keys of 192 and values of 128: a chunk of the context, which a request has not, and new tokens."""
    whole = Tokens(Batch((9, 4), (39, 4), heads=(4, 4), dim=192, dim_vo=128), device)
    for tokens, causal in zip(whole.split(), (False, True), strict=True):
        bounds = {"qo_indptr": tokens.qo_indptr.to(device), "kv_indptr": tokens.token_indptr.to(device)}
        wrapper, (k, v) = planned_ragged(tokens, causal, **bounds, o_data_type=BF16), tokens.ragged()
        out, lse = wrapper.run(q=tokens.q, k=k, v=v, out=None, return_lse=True)
        expected = tokens.expected(SCALE, causal=causal)
        assert_close(out, expected[0])
        assert_lse(lse, expected[1])
