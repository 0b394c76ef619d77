"""The calls of SGLang's FlashInfer backend without graphs: `begin_forward` with lengths, `forward` with the options.

Written after reading SGLang 0.5.23 (`srt/layers/attention/flashinfer_backend.py` and its subclasses). Pages have one
token; index arrays are on the device. Captured calls are in `test_sglang_graphs.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_attn import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from cute_attn.cascade import merge_state
from tests.support import multi_item
from tests.support.engine_case import (
    BF16,
    E4M3,
    Batch,
    Tokens,
    assert_close,
    assert_lse,
    ends,
    gpu_backend,
    workspace,
)

SCALE = 0.11
DECODE = Batch((1, 1, 1, 1), (33, 1, 16, 70), page_size=1)
EXTEND = Batch((7, 1, 20), (30, 17, 20), page_size=1)


def begin_decode(wrapper: Any, tokens: Tokens, **changes: Any) -> None:
    """`FlashInferIndicesUpdaterDecode.call_begin_forward` before `fast_decode_plan` is installed."""
    batch = tokens.batch
    wrapper.begin_forward(
        tokens.kv_indptr.to(tokens.device),
        tokens.kv_indices,
        torch.ones(len(batch.kv_lens), dtype=torch.int32, device=tokens.device),
        *(*batch.heads, batch.dim, 1),
        data_type=batch.kv_dtype,
        q_data_type=batch.dtype,
        non_blocking=True,
        **{"fixed_split_size": None, "disable_split_kv": False, **changes},
    )


def decode_wrapper(device: str) -> Any:
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", backend=gpu_backend(device, "fa2"), use_tensor_cores=False
    )


def decoded(tokens: Tokens, plan: dict[str, Any] | None = None, **forward: Any) -> torch.Tensor:
    """One layer of a new wrapper."""
    wrapper = decode_wrapper(tokens.device)
    begin_decode(wrapper, tokens, **(plan or {}))
    return forward_decode(wrapper, tokens, **forward)


def forward_decode(wrapper: Any, tokens: Tokens, **changes: Any) -> torch.Tensor:
    options = {"sm_scale": SCALE, "logits_soft_cap": 0.0, "k_scale": None, "v_scale": None, **changes}
    return wrapper.forward(tokens.q, tokens.pool(), **options)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_decode_with_the_default_scale(dim: int, device: str) -> None:
    """SGLang computes the default itself: it must be the library's to the last bit."""
    tokens = Tokens(dataclasses.replace(DECODE, dim=dim), device)
    assert_close(decoded(tokens, sm_scale=dim**-0.5), tokens.expected(dim**-0.5)[0])


def test_decode_with_another_scale_and_a_cap(device: str) -> None:
    """Two layers of a step after one `begin_forward`."""
    tokens = Tokens(DECODE, device)
    wrapper = decode_wrapper(device)
    begin_decode(wrapper, tokens)
    for scale, cap in ((SCALE, 2.0), (0.2, 0.0), (SCALE, 2.0)):
        out = forward_decode(wrapper, tokens, sm_scale=scale, logits_soft_cap=cap)
        assert_close(out, tokens.expected(scale, soft_cap=cap)[0])


def test_decode_over_an_fp8_cache(device: str) -> None:
    tokens = Tokens(dataclasses.replace(DECODE, kv_dtype=E4M3), device)
    out = decoded(tokens, k_scale=0.6, v_scale=1.7)
    assert_close(out, tokens.expected(SCALE * 0.6, v_scale=1.7)[0])


def test_deterministic_decode(device: str) -> None:
    tokens = Tokens(DECODE, device)
    assert_close(decoded(tokens, {"fixed_split_size": 2048}), tokens.expected(SCALE)[0])


def test_decode_of_a_model_with_sliding_windows(device: str) -> None:
    """Two wrappers share a workspace; the windowed one has the indices of the window alone."""
    tokens, window = Tokens(DECODE, device), 20
    near = tokens.newest([min(n, window + 1) for n in DECODE.kv_lens])
    wrappers = [decode_wrapper(device), decode_wrapper(device)]
    for wrapper, part in zip(wrappers, (near, tokens), strict=True):
        begin_decode(wrapper, part)
    assert_close(forward_decode(wrappers[0], near), tokens.expected(SCALE, window_left=window)[0])
    assert_close(forward_decode(wrappers[1], tokens), tokens.expected(SCALE)[0])


def test_planned_for_more_heads_than_a_layer_has(device: str) -> None:
    """SGLang plans with the most heads of any layer."""
    tokens = Tokens(DECODE, device)
    wrapper = decode_wrapper(device)
    most = dataclasses.replace(DECODE, heads=(8, 2))
    planned = Tokens(most, device)
    begin_decode(wrapper, planned)
    assert_close(forward_decode(wrapper, planned), planned.expected(SCALE)[0])
    tokens.kv_indices, tokens.pages, tokens.slots = planned.kv_indices, planned.pages, planned.slots
    assert_close(forward_decode(wrapper, tokens), tokens.expected(SCALE)[0])
    assert_close(forward_decode(wrapper, planned), planned.expected(SCALE)[0])


# ---- extend


def paged_wrapper(device: str) -> Any:
    return BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend=gpu_backend(device, "fa2"))


def ragged_wrapper(device: str) -> Any:
    return BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", backend="auto")


def begin_paged(wrapper: Any, tokens: Tokens, **changes: Any) -> None:
    """`FlashInferIndicesUpdaterPrefill.call_begin_forward`: 256 entries of kv_indices are left over."""
    batch, device = tokens.batch, tokens.device
    indices = torch.full((len(tokens.kv_indices) + 256,), 1 << 30, dtype=torch.int32, device=device)
    indices[: len(tokens.kv_indices)] = tokens.kv_indices
    options = {"custom_mask": None, "non_blocking": True, "fixed_split_size": None, "prefix_len_ptr": None}
    options |= {"token_pos_in_items_ptr": None, "token_pos_in_items_len": 0, "max_item_len_ptr": None, **changes}
    wrapper.begin_forward(
        tokens.qo_indptr.to(device),
        tokens.kv_indptr.to(device),
        indices,
        torch.ones(len(batch.kv_lens), dtype=torch.int32, device=device),
        *(*batch.heads, batch.dim, 1),
        q_data_type=batch.dtype,
        kv_data_type=batch.kv_dtype,
        **options,
    )


def forward_paged(wrapper: Any, tokens: Tokens, name: str = "forward", **changes: Any) -> Any:
    options = {"causal": True, "sm_scale": SCALE, "window_left": -1, "logits_soft_cap": 0.0}
    options |= {"k_scale": None, "v_scale": None, **changes}
    return getattr(wrapper, name)(tokens.q, tokens.pool(), **options)


def attended(tokens: Tokens, plan: dict[str, Any] | None = None, **forward: Any) -> torch.Tensor:
    """One layer of a new wrapper."""
    wrapper = paged_wrapper(tokens.device)
    begin_paged(wrapper, tokens, **(plan or {}))
    return forward_paged(wrapper, tokens, **forward)


@pytest.mark.parametrize("causal", [True, False], ids=["", "encoder"])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_paged_extend(causal: bool, cap: float, device: str) -> None:
    tokens = Tokens(EXTEND, device)
    out = attended(tokens, causal=causal, logits_soft_cap=cap)
    assert_close(out, tokens.expected(SCALE, causal=causal, soft_cap=cap)[0])


def test_paged_extend_over_an_fp8_cache(device: str) -> None:
    tokens = Tokens(dataclasses.replace(EXTEND, kv_dtype=E4M3), device)
    out = attended(tokens, {"fixed_split_size": 4096}, k_scale=0.6, v_scale=1.7)
    assert_close(out, tokens.expected(SCALE * 0.6, causal=True, v_scale=1.7)[0])


def test_paged_extend_with_a_window(device: str) -> None:
    """Planned and run with the window, over no more keys than some query of the request sees."""
    window = 9
    tokens = Tokens(EXTEND, device)
    lens = [min(n, window + m) for m, n in zip(EXTEND.q_lens, EXTEND.kv_lens, strict=True)]
    out = attended(tokens.newest(lens), {"window_left": window}, window_left=window)
    assert_close(out, tokens.expected(SCALE, causal=True, window_left=window)[0])


def test_ragged_extend(device: str) -> None:
    """Without cached tokens, keys and values come as they are; heads and query are views of one projection."""
    tokens = Tokens(Batch((9, 1, 20), (9, 1, 20)), device)
    wrapper = ragged_wrapper(device)
    bounds = tokens.qo_indptr.to(device)
    wrapper.begin_forward(bounds, bounds, *tokens.batch.heads, 128, q_data_type=BF16)
    k, v = tokens.ragged()
    fused = torch.cat([tokens.q.flatten(1), k.flatten(1), v.flatten(1)], 1)
    q, k, v = (x.unflatten(1, (-1, 128)) for x in fused.split([512, 256, 256], 1))
    for cap in (2.0, 0.0):
        out = wrapper.forward(q.contiguous(), k, v, causal=True, sm_scale=SCALE, logits_soft_cap=cap)
        assert_close(out, tokens.expected(SCALE, causal=True, soft_cap=cap)[0])


def split(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """The cached prefix and the new tokens of every request, with the same queries."""
    cached = [n - m for m, n in zip(tokens.batch.q_lens, tokens.batch.kv_lens, strict=True)]
    parts = []
    for cut, lens in ((lambda x, n: x[:n], cached), (lambda x, n: x[n:], list(tokens.batch.q_lens))):
        pairs = ([cut(x, n) for x, n in zip(side, cached, strict=True)] for side in (tokens.keys, tokens.values))
        part = Tokens(dataclasses.replace(tokens.batch, kv_lens=lens), tokens.device, *pairs)
        part.q, part.queries = tokens.q, tokens.queries
        parts.append(part)
    return parts[0], parts[1]


@pytest.mark.parametrize("window", [-1, 5])
def test_extend_of_a_cached_prefix(window: int, device: str) -> None:
    """New tokens over themselves, and over the prefix; with a window, the latter's last tokens under a uint8 mask."""
    tokens = Tokens(EXTEND, device)
    cached, new = split(tokens)
    mask = None
    if window >= 0:
        lens = cached.batch.kv_lens
        starts = [max(0, n - window) for n in lens]
        pairs = ([x[n:] for x, n in zip(side, starts, strict=True)] for side in (cached.keys, cached.values))
        near = dataclasses.replace(cached.batch, kv_lens=[n - first for n, first in zip(lens, starts, strict=True)])
        blocks = [
            (torch.arange(first, n)[None] >= torch.arange(m)[:, None] + n - window).to(torch.uint8).flatten()
            for first, n, m in zip(starts, lens, cached.batch.q_lens, strict=True)
        ]
        mask = torch.cat(blocks).to(device)
        cached = Tokens(near, device, *pairs)
        cached.q = new.q
    ragged, paged = ragged_wrapper(device), paged_wrapper(device)
    bounds = tokens.qo_indptr.to(device)
    ragged.begin_forward(bounds, bounds, *tokens.batch.heads, 128, q_data_type=BF16)
    begin_paged(paged, cached, custom_mask=mask)
    first = ragged.forward_return_lse(
        tokens.q, *new.ragged(), causal=True, sm_scale=SCALE, window_left=window, logits_soft_cap=0.0
    )
    second = forward_paged(paged, cached, "forward_return_lse", causal=False, window_left=window)
    out, lse = merge_state(*first, *second)
    expected = tokens.expected(SCALE, causal=True, window_left=window)
    assert_close(out, expected[0])
    assert_lse(lse, expected[1])


def test_cross_attention(device: str) -> None:
    """The second wrapper of an encoder-decoder model sees the encoder's tokens, under a mask of their lengths."""
    tokens = Tokens(dataclasses.replace(EXTEND, kv_lens=(12, 12, 12)), device)
    keep = [torch.arange(12)[None].expand(n, -1) < most for n, most in zip(EXTEND.q_lens, (12, 5, 9), strict=True)]
    out = attended(tokens, {"custom_mask": torch.cat([x.flatten() for x in keep]).to(device)}, causal=False)
    assert_close(out, tokens.expected(SCALE, keep=keep)[0])


def test_verification_of_a_tree(device: str) -> None:
    """EAGLE: every draft token sees the prefix and its ancestors; `causal=True` gives way to the mask."""
    tokens = Tokens(Batch((4, 4), (30, 17), page_size=1), device)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    keep = [torch.cat([torch.ones(4, n - 4, dtype=torch.bool), tree], 1) for n in tokens.batch.kv_lens]
    out = attended(tokens, {"custom_mask": torch.cat([x.flatten() for x in keep]).to(device)})
    assert_close(out, tokens.expected(SCALE, keep=keep)[0])


def test_multi_item_scoring(device: str) -> None:
    """A query and candidates after delimiters; of the second request, part of the prefix is cached."""
    tokens = Tokens(Batch((13, 15), (13, 19), page_size=1), device)
    items = multi_item.draw(tokens.batch.q_lens, tokens.batch.kv_lens, 3, 0)
    assert min(items.prefix_lens) > 0
    out = attended(tokens, items.arguments(device, slack=0))
    assert_close(out, tokens.expected(SCALE, keep=items.keep)[0])


def test_a_mask_of_text_and_image_tokens(device: str) -> None:
    """LLaDA: text does not see what follows it."""
    tokens = Tokens(Batch((14, 9), (14, 9)), device)
    keep = [torch.ones(n, n, dtype=torch.bool) for n in (14, 9)]
    for block, text in zip(keep, (6, 3), strict=True):
        block[:text, text:] = False
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", backend=gpu_backend(device, "fa2"))
    bounds = tokens.qo_indptr.to(device)
    wrapper.begin_forward(
        *(bounds, bounds, *tokens.batch.heads, 128),
        custom_mask=torch.cat([x.flatten() for x in keep]).to(device),
        causal=False,
        q_data_type=BF16,
        kv_data_type=BF16,
        non_blocking=True,
        fixed_split_size=None,
    )
    out = wrapper.forward(tokens.q, *tokens.ragged(), causal=False, sm_scale=SCALE, logits_soft_cap=0.0)
    assert_close(out, tokens.expected(SCALE, keep=keep)[0])


def test_ragged_prefill_of_mla(device: str) -> None:
    """Decompressed keys of 192 and values of 128: new tokens, a chunk of the prefix, and both merged."""
    whole = Tokens(Batch((9, 4), (30, 11), heads=(4, 4), dim=192, dim_vo=128), device)
    results = []
    for tokens, causal in zip(split(whole), (False, True), strict=True):
        wrapper = ragged_wrapper(device)
        wrapper.begin_forward(
            qo_indptr=tokens.qo_indptr.to(device),
            kv_indptr=ends(tokens.batch.kv_lens).to(device),
            num_qo_heads=4,
            num_kv_heads=4,
            head_dim_qk=192,
            head_dim_vo=128,
            q_data_type=BF16,
            causal=causal,
        )
        k, v = tokens.ragged()
        results.append(wrapper.forward_return_lse(tokens.q, k, v, causal=causal, sm_scale=SCALE, logits_soft_cap=0.0))
    out, lse = merge_state(*results[0], *results[1])
    expected = whole.expected(SCALE, causal=True)
    assert_close(out, expected[0])
    assert_lse(lse, expected[1])
