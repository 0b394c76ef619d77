"""The calls of SGLang's FlashInfer backend: `begin_forward` with lengths, `forward` with the options; captured or not.

Written after reading SGLang 0.5.23 (`srt/layers/attention/flashinfer_backend.py` and its subclasses). Pages have one
token; index arrays are on the device. Captured calls are planned and captured once with the largest batch, then planned
again and replayed: `begin_forward` leaves scale, soft cap and causality open; the first `forward` settles them, and
later plans keep them. After the capture, SGLang replaces `begin_forward` of decode wrappers with
`partial(fast_decode_plan, wrapper)`, and of prefill wrappers with a function of its own, of `fast_prefill_plan`'s form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from cute_attn import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    fast_decode_plan,
)
from cute_attn.cascade import merge_state
from cute_attn.prefill import fast_prefill_plan
from tests.support import multi_item
from tests.support.engine_case import (
    BF16,
    E4M3,
    Batch,
    Graph,
    Tokens,
    assert_close,
    assert_lse,
    ends,
    gpu_backend,
    workspace,
)

SCALE = 0.11
POOL = 400  # slots
LENGTHS = [(90, 90, 90), (33, 1, 70), (5, 64, 2), (16, 1, 1)]
WINDOW = 20
EXTEND = Batch((7, 1, 20), (30, 17, 20), page_size=1)
UNSCALED = {"logits_soft_cap": 0.0, "k_scale": None, "v_scale": None}
CAPTURED = pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])


class Buffers:
    """What the backend allocates once: tokens, caches and the index buffers of its wrappers."""

    def __init__(self, first: Tokens) -> None:
        device, requests = first.device, len(first.batch.kv_lens)

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.device, self.q = device, torch.zeros_like(first.q)
        self.cache = [torch.zeros_like(x) for x in first.pool()]
        self.kv_indptr, self.qo_indptr, self.mask_indptr = zeros(9), zeros(9), zeros(9)
        self.indices, self.last_page_len = zeros(2 * POOL), torch.ones(8, dtype=torch.int32, device=device)
        self.mask = torch.zeros(4096, dtype=torch.uint8, device=device)
        self.requests = requests

    def fill(self, tokens: Tokens) -> None:
        self.q[: len(tokens.q)].copy_(tokens.q)
        for target, source in zip(self.cache, tokens.pool(), strict=True):
            target.copy_(source)
        self.indices[: len(tokens.kv_indices)].copy_(tokens.kv_indices)

    def decode(self, captured: bool = True) -> Any:
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self.kv_indptr[: self.requests + 1],
            "paged_kv_indices_buffer": self.indices,
            "paged_kv_last_page_len_buffer": self.last_page_len[: self.requests],
        }
        place, backend = (workspace(self.device), "NHD"), gpu_backend(self.device, "fa2")
        return BatchDecodeWithPagedKVCacheWrapper(
            *place, backend=backend, use_tensor_cores=False, **(buffers if captured else {})
        )

    def prefill(self, with_mask: bool = False) -> Any:
        extra = {"custom_mask_buf": self.mask, "mask_indptr_buf": self.mask_indptr[: self.requests + 1]}
        return BatchPrefillWithPagedKVCacheWrapper(
            workspace(self.device),
            "NHD",
            use_cuda_graph=True,
            backend=gpu_backend(self.device, "fa2"),
            qo_indptr_buf=self.qo_indptr[: self.requests + 1],
            paged_kv_indptr_buf=self.kv_indptr[: self.requests + 1],
            paged_kv_indices_buf=self.indices,
            paged_kv_last_page_len_buf=self.last_page_len[: self.requests],
            **(extra if with_mask else {}),
        )


def cases(q_lens: Sequence[int], lengths: Sequence[Sequence[int]], device: str, **changes: Any) -> list[Tokens]:
    return [
        Tokens(Batch(q_lens, kv_lens, page_size=1, num_pages=POOL, seed=i, **changes), device)
        for i, kv_lens in enumerate(lengths)
    ]


# ---- decode


def begin_decode(wrapper: Any, tokens: Tokens, buffers: Buffers | None = None, **changes: Any) -> None:
    """`FlashInferIndicesUpdaterDecode.call_begin_forward`: with graphs, from the wrapper's own buffers. `spare`: pages
    of these behind those of the batch; all by default.
    """
    batch, requests = tokens.batch, len(tokens.batch.kv_lens)
    bounds, indices = tokens.kv_indptr.to(tokens.device), tokens.kv_indices
    last = torch.ones(requests, dtype=torch.int32, device=tokens.device)
    options: dict[str, Any] = {"fixed_split_size": None, "disable_split_kv": False, **changes}
    if buffers is not None:
        bounds = buffers.kv_indptr[: requests + 1].copy_(bounds)
        wrapper._paged_kv_indices_buf[: len(indices)].copy_(indices)
        spare = options.pop("spare", len(wrapper._paged_kv_indices_buf))
        indices, last = wrapper._paged_kv_indices_buf[: len(indices) + spare], buffers.last_page_len[:requests]
    if hasattr(wrapper.begin_forward, "func") and wrapper.begin_forward.func == fast_decode_plan:
        options["global_override_indptr_cpu"] = ends(batch.kv_lens)
    dtypes = {"data_type": batch.kv_dtype, "q_data_type": batch.dtype, "non_blocking": True}
    wrapper.begin_forward(bounds, indices, last, *batch.heads, batch.dim, 1, **dtypes, **options)


def steps_of_decode(
    sides: list[list[Tokens]], captured: bool, forward: dict[str, Any], plan: dict[str, Any] | None = None
) -> None:
    """Steps of wrappers that are planned one after the other, and run in one graph. `sides`: the steps of each."""
    held = [Buffers(steps[0]) for steps in sides]
    wrappers = [buffers.decode(captured) for buffers in held]

    def begin(step: int) -> None:
        for steps, buffers, wrapper in zip(sides, held, wrappers, strict=True):
            buffers.fill(steps[step])
            begin_decode(wrapper, steps[step], buffers if captured else None, **(plan or {}))

    def run() -> list[torch.Tensor]:
        pairs = zip(wrappers, held, strict=True)
        return [wrapper.forward(x.q, tuple(x.cache), **{**UNSCALED, **forward}) for wrapper, x in pairs]

    begin(0)
    again: Callable[[], Any] = run
    if captured:
        for wrapper in wrappers:
            wrapper.begin_forward = partial(fast_decode_plan, wrapper)
        again = Graph(held[0].device, run).replay
    for step in range(len(sides[0])):
        begin(step)
        for out, steps in zip(again(), sides, strict=True):
            assert_close(out, steps[step].solved(**forward))


CAPPED = {"sm_scale": 0.2, "logits_soft_cap": 2.0}
DECODES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # batch, forward, plan
    # SGLang computes the default scale itself: it must be the library's to the last bit.
    **{f"dim-{dim}": ({"dim": dim}, {"sm_scale": dim**-0.5}, {}) for dim in (64, 96, 128, 256)},
    "capped": ({}, CAPPED, {}),
    "deterministic": ({}, CAPPED, {"disable_split_kv": True}),
    "split-size": ({}, {"sm_scale": SCALE}, {"fixed_split_size": 2048}),
    "e4m3": ({"kv_dtype": E4M3}, {"sm_scale": SCALE, "k_scale": 0.6, "v_scale": 1.7}, {}),
}


@CAPTURED
@pytest.mark.parametrize("name", DECODES)
def test_decode(name: str, captured: bool, device: str) -> None:
    batch, forward, plan = DECODES[name]
    steps_of_decode([cases((1,) * 3, LENGTHS, device, **batch)], captured, forward, plan)


@CAPTURED
def test_sliding_windows(captured: bool, device: str) -> None:
    """Two wrappers, of which one has the window's keys alone."""
    steps = cases((1,) * 3, LENGTHS, device)
    near = [tokens.newest([min(n, WINDOW + 1) for n in tokens.batch.kv_lens]) for tokens in steps]
    steps_of_decode([near, steps], captured, {"sm_scale": SCALE})


def test_steps_of_a_draft(device: str) -> None:
    """Two branches of each request; page numbers are a row of a larger buffer, longer than what is used."""
    steps = cases((1,) * 4, [(40, 40, 40, 40), (33, 33, 8, 8), (2, 2, 39, 39)], device)
    steps_of_decode([steps], True, {"sm_scale": SCALE}, {"spare": 12})


# ---- extend


def paged_wrapper(device: str) -> Any:
    return BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend=gpu_backend(device, "fa2"))


def ragged_wrapper(device: str) -> Any:
    return BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", backend="auto")


def begin_ragged(wrapper: Any, tokens: Tokens, **options: Any) -> None:
    """Over the new tokens alone."""
    bounds = tokens.qo_indptr.to(tokens.device)
    wrapper.begin_forward(bounds, bounds, *tokens.batch.heads, 128, q_data_type=BF16, **options)


def begin_paged(wrapper: Any, tokens: Tokens, **changes: Any) -> None:
    """`FlashInferIndicesUpdaterPrefill.call_begin_forward`: 256 entries of kv_indices are left over. Where
    `begin_forward` has been replaced, lengths that the host knows spare the plan every synchronisation.
    """
    batch, device = tokens.batch, tokens.device
    indices = torch.full((len(tokens.kv_indices) + 256,), 1 << 30, dtype=torch.int32, device=device)
    indices[: len(tokens.kv_indices)] = tokens.kv_indices
    options = {"custom_mask": None, "non_blocking": True, "fixed_split_size": None, "prefix_len_ptr": None}
    options |= {"token_pos_in_items_ptr": None, "token_pos_in_items_len": 0, "max_item_len_ptr": None, **changes}
    if hasattr(wrapper.begin_forward, "func"):
        options |= {"qo_indptr_host": tokens.qo_indptr, "kv_indptr_host": tokens.token_indptr}
        options |= {"kv_lens_host": tokens.seq_lens.cpu(), "max_q_len": batch.q_lens[0]}
        width = None if options["custom_mask"] is None else batch.q_lens[0]
        options |= {"max_kv_len": max(batch.kv_lens), "uniform_verify_width": width}
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
    options = {"causal": True, "sm_scale": SCALE, "window_left": -1, **UNSCALED, **changes}
    return getattr(wrapper, name)(tokens.q, tokens.pool(), **options)


def attended(tokens: Tokens, plan: dict[str, Any] | None = None, **forward: Any) -> torch.Tensor:
    """One layer of a new wrapper."""
    wrapper = paged_wrapper(tokens.device)
    begin_paged(wrapper, tokens, **(plan or {}))
    return forward_paged(wrapper, tokens, **forward)


EXTENDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # batch, plan, forward
    "plain": ({}, {}, {}),
    "capped": ({}, {}, {"logits_soft_cap": 2.0}),
    "encoder": ({}, {}, {"causal": False}),
    "encoder-capped": ({}, {}, {"causal": False, "logits_soft_cap": 2.0}),
    "e4m3": ({"kv_dtype": E4M3}, {"fixed_split_size": 4096}, {"k_scale": 0.6, "v_scale": 1.7}),
}


@pytest.mark.parametrize("name", EXTENDS)
def test_paged_extend(name: str, device: str) -> None:
    batch, plan, forward = EXTENDS[name]
    tokens = Tokens(dataclasses.replace(EXTEND, **batch), device)
    out = attended(tokens, plan, **forward)
    assert_close(out, tokens.solved(**{"sm_scale": SCALE, "causal": True, **forward}))


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
    begin_ragged(wrapper, tokens)
    k, v = tokens.ragged()
    fused = torch.cat([tokens.q.flatten(1), k.flatten(1), v.flatten(1)], 1)
    q, k, v = (x.unflatten(1, (-1, 128)) for x in fused.split([512, 256, 256], 1))
    for cap in (2.0, 0.0):
        out = wrapper.forward(q.contiguous(), k, v, causal=True, sm_scale=SCALE, logits_soft_cap=cap)
        assert_close(out, tokens.expected(SCALE, causal=True, soft_cap=cap)[0])


@pytest.mark.parametrize("window", [-1, 5])
def test_extend_of_a_cached_prefix(window: int, device: str) -> None:
    """New tokens over themselves, and over the prefix; with a window, the latter's last tokens under a uint8 mask."""
    tokens = Tokens(EXTEND, device)
    cached, new = tokens.split()
    mask = None
    if window >= 0:
        lens = cached.batch.kv_lens
        near = [min(n, window) for n in lens]
        blocks = [
            (torch.arange(n - kept, n)[None] >= torch.arange(m)[:, None] + n - window).to(torch.uint8).flatten()
            for kept, n, m in zip(near, lens, cached.batch.q_lens, strict=True)
        ]
        mask = torch.cat(blocks).to(device)
        cached = cached.newest(near)
        cached.q = new.q
    ragged, paged = ragged_wrapper(device), paged_wrapper(device)
    begin_ragged(ragged, tokens)
    begin_paged(paged, cached, custom_mask=mask)
    first = ragged.forward_return_lse(
        tokens.q, *new.ragged(), causal=True, sm_scale=SCALE, window_left=window, logits_soft_cap=0.0
    )
    second = forward_paged(paged, cached, "forward_return_lse", causal=False, window_left=window)
    out, lse = merge_state(*first, *second)
    expected = tokens.expected(SCALE, causal=True, window_left=window)
    assert_close(out, expected[0])
    assert_lse(lse, expected[1])


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
    options = {"causal": False, "kv_data_type": BF16, "non_blocking": True, "fixed_split_size": None}
    begin_ragged(wrapper, tokens, custom_mask=torch.cat([x.flatten() for x in keep]).to(device), **options)
    out = wrapper.forward(tokens.q, *tokens.ragged(), causal=False, sm_scale=SCALE, logits_soft_cap=0.0)
    assert_close(out, tokens.expected(SCALE, keep=keep)[0])


# ---- captured prefills


def replay_prefill(
    steps: list[Tokens], keeps: list[list[torch.Tensor]] | None, causal: bool, fast: bool = False
) -> None:
    buffers = Buffers(steps[0])
    wrapper = buffers.prefill(keeps is not None)
    planned: list[Tokens] = []

    def plan(number: int) -> None:
        buffers.fill(steps[number])
        mask = None if keeps is None else torch.cat([x.flatten() for x in keeps[number]]).to(buffers.device)
        begin_paged(wrapper, steps[number], custom_mask=mask)
        planned[:] = [steps[number]]

    def run() -> torch.Tensor:
        """On the CPU nothing is captured, and there are as many rows as are planned."""
        rows = len(buffers.q) if buffers.device == "cuda" else len(planned[0].q)
        options = {"causal": causal, "sm_scale": SCALE, "window_left": -1, **UNSCALED}
        return wrapper.forward(buffers.q[:rows], tuple(buffers.cache), **options)

    plan(0)
    if fast:
        wrapper.begin_forward = partial(fast_prefill_plan, wrapper)
    graph = Graph(buffers.device, run)
    for number, now in enumerate(steps):
        plan(number)
        out = graph.replay()
        keep = None if keeps is None else keeps[number]
        assert_close(out[: len(now.q)], now.expected(SCALE, causal=causal, keep=keep)[0])


def test_buffers_that_the_backend_reads(device: str) -> None:
    """It writes page numbers into one, and tells by another whether a mask was captured."""
    buffers = Buffers(cases((4,) * 3, [(80, 90, 70)], device)[0])
    plain, masked = buffers.prefill(), buffers.prefill(with_mask=True)
    assert plain._custom_mask_buf is None
    assert masked._custom_mask_buf is buffers.mask
    assert masked._mask_indptr_buf.data_ptr() == buffers.mask_indptr.data_ptr()
    assert plain._qo_indptr_buf.data_ptr() == buffers.qo_indptr.data_ptr()
    for wrapper in (plain, masked, buffers.decode()):
        assert wrapper.is_cuda_graph_enabled
        assert wrapper._paged_kv_indices_buf is buffers.indices
        assert wrapper._paged_kv_indptr_buf.data_ptr() == buffers.kv_indptr.data_ptr()
        assert wrapper._paged_kv_last_page_len_buf.data_ptr() == buffers.last_page_len.data_ptr()
        assert wrapper._float_workspace_buffer.device == wrapper.device


FAST = pytest.mark.parametrize("fast", [False, True], ids=["", "host-lengths"])


def trees(tokens: Tokens, generator: torch.Generator) -> list[torch.Tensor]:
    """EAGLE: every draft token sees the prefix and its ancestors."""
    keep = [torch.ones(4, n, dtype=torch.bool) for n in tokens.batch.kv_lens]
    for block in keep:
        tree = (torch.rand(4, 4, generator=generator) < 0.5).tril() | torch.eye(4, dtype=torch.bool)
        block[:, block.shape[1] - 4 :] = tree
    return keep


@FAST
def test_captured_verification_of_a_tree(fast: bool, device: str) -> None:
    steps = cases((4,) * 3, [(80, 90, 70), (33, 4, 70), (5, 64, 12)], device)
    generator = torch.Generator().manual_seed(3)
    replay_prefill(steps, [trees(now, generator) for now in steps], True, fast)


@FAST
@pytest.mark.parametrize("causal", [True, False], ids=["draft-extend", "bidirectional-verify"])
def test_as_many_tokens_for_every_request(causal: bool, fast: bool, device: str) -> None:
    replay_prefill(cases((3,) * 3, [(80, 90, 70), (33, 3, 70), (5, 64, 12)], device), None, causal, fast)


def test_whole_prefill(device: str) -> None:
    """Request slots and rows are those of the capture: later batches have fewer rows, and slots without tokens."""
    whole = [((16, 10, 6), (16, 30, 40)), ((5, 11, 0), (25, 11, 0)), ((20, 0, 0), (60, 0, 0)), ((1, 1, 1), (9, 1, 70))]
    steps = [
        Tokens(Batch(q_lens, kv_lens, page_size=1, num_pages=POOL, seed=i), device)
        for i, (q_lens, kv_lens) in enumerate(whole)
    ]
    replay_prefill(steps, None, True)
