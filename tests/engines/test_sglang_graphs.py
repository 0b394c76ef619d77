"""SGLang's captured calls: planned and captured once with the largest batch, then planned again and replayed.

`begin_forward` leaves scale, soft cap and causality open; the first `forward` settles them, and later plans keep them.
After the capture, SGLang replaces `begin_forward` of decode wrappers with `partial(fast_decode_plan, wrapper)`, and of
prefill wrappers with a function of its own, of `fast_prefill_plan`'s form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from cute_attn import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, fast_decode_plan
from cute_attn.prefill import fast_prefill_plan
from tests.support.engine_case import (
    BF16,
    E4M3,
    Batch,
    Graph,
    Tokens,
    assert_close,
    ends,
    gpu_backend,
    workspace,
)

SCALE = 0.11
POOL = 400  # slots
LENGTHS = [(90, 90, 90), (33, 1, 70), (5, 64, 2), (16, 1, 1)]


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

    def decode(self, **changes: Any) -> Any:
        return BatchDecodeWithPagedKVCacheWrapper(
            workspace(self.device),
            "NHD",
            backend=gpu_backend(self.device, "fa2"),
            use_cuda_graph=True,
            use_tensor_cores=False,
            paged_kv_indptr_buffer=self.kv_indptr[: self.requests + 1],
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last_page_len[: self.requests],
            **changes,
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


def begin_decode(wrapper: Any, buffers: Buffers, tokens: Tokens, **changes: Any) -> None:
    """Write page numbers and offsets into the wrapper's buffers and plan from them, as SGLang does."""
    batch = tokens.batch
    bounds = buffers.kv_indptr[: buffers.requests + 1]
    bounds.copy_(tokens.kv_indptr)
    wrapper._paged_kv_indices_buf[: len(tokens.kv_indices)].copy_(tokens.kv_indices)
    options: dict[str, Any] = {"fixed_split_size": None, "disable_split_kv": False, **changes}
    if hasattr(wrapper.begin_forward, "func") and wrapper.begin_forward.func == fast_decode_plan:
        options["global_override_indptr_cpu"] = ends(batch.kv_lens)
    wrapper.begin_forward(
        bounds,
        wrapper._paged_kv_indices_buf,
        buffers.last_page_len[: buffers.requests],
        *(*batch.heads, batch.dim, 1),
        data_type=batch.kv_dtype,
        q_data_type=batch.dtype,
        non_blocking=True,
        **options,
    )


def replay_decode(steps: list[Tokens], forward: dict[str, Any], expect: Callable[[Tokens], Any], **plan: Any) -> None:
    buffers = Buffers(steps[0])
    wrapper = buffers.decode()
    begin_decode(wrapper, buffers, steps[0], **plan)
    wrapper.begin_forward = partial(fast_decode_plan, wrapper)
    options = {"logits_soft_cap": 0.0, "k_scale": None, "v_scale": None, **forward}
    graph = Graph(buffers.device, lambda: wrapper.forward(buffers.q, tuple(buffers.cache), **options))
    for now in steps:
        buffers.fill(now)
        begin_decode(wrapper, buffers, now, **plan)
        assert_close(graph.replay(), expect(now))


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_decode_with_the_default_scale(dim: int, device: str) -> None:
    steps = cases((1,) * 3, LENGTHS, device, dim=dim)
    replay_decode(steps, {"sm_scale": dim**-0.5}, lambda now: now.expected(dim**-0.5)[0])


@pytest.mark.parametrize("disable_split_kv", [False, True], ids=["", "deterministic"])
def test_decode_with_another_scale_and_a_cap(disable_split_kv: bool, device: str) -> None:
    steps = cases((1,) * 3, LENGTHS, device)
    forward = {"sm_scale": 0.2, "logits_soft_cap": 2.0}
    expected = lambda now: now.expected(0.2, soft_cap=2.0)[0]  # noqa: E731
    replay_decode(steps, forward, expected, disable_split_kv=disable_split_kv)


def test_decode_over_an_fp8_cache(device: str) -> None:
    steps = cases((1,) * 3, LENGTHS, device, kv_dtype=E4M3)
    scales = {"sm_scale": SCALE, "k_scale": 0.6, "v_scale": 1.7}
    replay_decode(steps, scales, lambda now: now.expected(SCALE * 0.6, v_scale=1.7)[0])


def test_steps_of_a_draft(device: str) -> None:
    """Two branches of each request; page numbers are a row of a larger buffer, longer than what is used."""
    lengths = [(40, 40, 40, 40), (33, 33, 8, 8), (2, 2, 39, 39)]
    steps = cases((1,) * 4, lengths, device)
    buffers = Buffers(steps[0])
    wrapper = buffers.decode()
    for number, now in enumerate(steps):
        buffers.fill(now)
        bounds = buffers.kv_indptr[: buffers.requests + 1]
        bounds.copy_(now.kv_indptr)
        override = {} if number == 0 else {"global_override_indptr_cpu": ends(now.batch.kv_lens)}
        wrapper.begin_forward(
            bounds,
            buffers.indices[: len(now.kv_indices) + 12],
            buffers.last_page_len[:4],
            *(4, 2, 128, 1),
            data_type=BF16,
            q_data_type=BF16,
            non_blocking=True,
            fixed_split_size=None,
            disable_split_kv=False,
            **override,
        )
        if number == 0:
            wrapper.begin_forward = partial(fast_decode_plan, wrapper)
            options = {"sm_scale": SCALE, "logits_soft_cap": 0.0, "k_scale": None, "v_scale": None}
            graph = Graph(device, lambda options=options: wrapper.forward(buffers.q, tuple(buffers.cache), **options))
        assert_close(graph.replay(), now.expected(SCALE)[0])


def test_plan_may_be_replaced_too(device: str) -> None:
    """vLLM and others bind `plan` itself; what the first plan said of the output's dtype stays."""
    steps = cases((1,) * 3, LENGTHS, device, kv_dtype=E4M3)
    buffers = Buffers(steps[0])
    wrapper = buffers.decode()
    where = (buffers.indices, buffers.last_page_len[:3], 4, 2, 128, 1)
    buffers.fill(steps[0])
    wrapper.plan(
        *(steps[0].kv_indptr, *where), q_data_type=BF16, kv_data_type=E4M3, o_data_type=torch.float16, sm_scale=SCALE
    )
    wrapper.plan = partial(fast_decode_plan, wrapper)
    for now in steps:
        buffers.fill(now)
        wrapper.plan(now.kv_indptr, *where, q_data_type=BF16, kv_data_type=E4M3, sm_scale=SCALE)
        out = wrapper.run(buffers.q, tuple(buffers.cache))
        assert out.dtype == torch.float16
        assert_close(out, now.expected(SCALE)[0])


def test_sliding_windows(device: str) -> None:
    """Two captured wrappers, of which one has the window's keys alone."""
    window = 20
    steps = cases((1,) * 3, LENGTHS, device)
    near = [tokens.newest([min(n, window + 1) for n in tokens.batch.kv_lens]) for tokens in steps]
    sides = (near, steps)
    held = [Buffers(side[0]) for side in sides]
    wrappers = [buffers.decode() for buffers in held]
    for side, buffers, wrapper in zip(sides, held, wrappers, strict=True):
        begin_decode(wrapper, buffers, side[0])
        wrapper.begin_forward = partial(fast_decode_plan, wrapper)

    def run() -> tuple[torch.Tensor, ...]:
        options = {"sm_scale": SCALE, "logits_soft_cap": 0.0, "k_scale": None, "v_scale": None}
        pairs = zip(wrappers, held, strict=True)
        return tuple(wrapper.forward(buffers.q, tuple(buffers.cache), **options) for wrapper, buffers in pairs)

    graph = Graph(device, run)
    for number, now in enumerate(steps):
        for side, buffers, wrapper in zip(sides, held, wrappers, strict=True):
            buffers.fill(side[number])
            begin_decode(wrapper, buffers, side[number])
        local, full = graph.replay()
        assert_close(local, now.expected(SCALE, window_left=window)[0])
        assert_close(full, now.expected(SCALE)[0])


# ---- prefill


def begin_prefill(wrapper: Any, buffers: Buffers, tokens: Tokens, mask: torch.Tensor | None = None) -> None:
    """Where `begin_forward` has been replaced, lengths that the host knows spare the plan every synchronisation."""
    batch, device, known = tokens.batch, tokens.device, {}
    if hasattr(wrapper.begin_forward, "func"):
        known = {"qo_indptr_host": tokens.qo_indptr, "kv_indptr_host": tokens.token_indptr}
        known |= {"kv_lens_host": tokens.seq_lens.cpu(), "max_q_len": batch.q_lens[0]}
        known |= {"max_kv_len": max(batch.kv_lens), "uniform_verify_width": None if mask is None else batch.q_lens[0]}
    indices = torch.full((len(tokens.kv_indices) + 256,), 7, dtype=torch.int32, device=device)
    indices[: len(tokens.kv_indices)] = tokens.kv_indices
    wrapper.begin_forward(
        tokens.qo_indptr.to(device),
        tokens.kv_indptr.to(device),
        indices,
        buffers.last_page_len[: buffers.requests],
        *(*batch.heads, batch.dim, 1),
        q_data_type=batch.dtype,
        kv_data_type=batch.kv_dtype,
        custom_mask=mask,
        non_blocking=True,
        fixed_split_size=None,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        **known,
    )


def replay_prefill(
    steps: list[Tokens],
    masks: list[torch.Tensor] | None,
    causal: bool,
    expect: Callable[[int, Tokens], torch.Tensor],
    fast: bool = False,
) -> None:
    buffers = Buffers(steps[0])
    wrapper = buffers.prefill(masks is not None)
    planned: list[Tokens] = []

    def plan(number: int) -> None:
        buffers.fill(steps[number])
        begin_prefill(wrapper, buffers, steps[number], None if masks is None else masks[number])
        planned[:] = [steps[number]]

    def run() -> torch.Tensor:
        """On the CPU nothing is captured, and there are as many rows as are planned."""
        rows = len(buffers.q) if buffers.device == "cuda" else len(planned[0].q)
        return wrapper.forward(
            buffers.q[:rows],
            tuple(buffers.cache),
            causal=causal,
            sm_scale=SCALE,
            window_left=-1,
            logits_soft_cap=0.0,
            k_scale=None,
            v_scale=None,
        )

    plan(0)
    if fast:
        wrapper.begin_forward = partial(fast_prefill_plan, wrapper)
    graph = Graph(buffers.device, run)
    for number, now in enumerate(steps):
        plan(number)
        out = graph.replay()
        assert_close(out[: len(now.q)], expect(number, now))


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


@FAST
def test_verification_of_a_tree(fast: bool, device: str) -> None:
    steps = cases((4,) * 3, [(80, 90, 70), (33, 4, 70), (5, 64, 12)], device)
    keeps, generator = [], torch.Generator().manual_seed(3)
    for now in steps:
        keep = [torch.ones(4, n, dtype=torch.bool) for n in now.batch.kv_lens]
        for block in keep:
            tree = (torch.rand(4, 4, generator=generator) < 0.5).tril() | torch.eye(4, dtype=torch.bool)
            block[:, block.shape[1] - 4 :] = tree
        keeps.append(keep)
    masks = [torch.cat([x.flatten() for x in keep]).to(device) for keep in keeps]
    replay_prefill(steps, masks, True, lambda i, now: now.expected(SCALE, keep=keeps[i])[0], fast)


@FAST
@pytest.mark.parametrize("causal", [True, False], ids=["draft-extend", "bidirectional-verify"])
def test_as_many_tokens_for_every_request(causal: bool, fast: bool, device: str) -> None:
    steps = cases((3,) * 3, [(80, 90, 70), (33, 3, 70), (5, 64, 12)], device)
    replay_prefill(steps, None, causal, lambda _, now: now.expected(SCALE, causal=causal)[0], fast)


def test_whole_prefill(device: str) -> None:
    """Request slots and rows are those of the capture: later batches have fewer rows, and slots without tokens."""
    whole = [((16, 10, 6), (16, 30, 40)), ((5, 11, 0), (25, 11, 0)), ((20, 0, 0), (60, 0, 0)), ((1, 1, 1), (9, 1, 70))]
    steps = [
        Tokens(Batch(q_lens, kv_lens, page_size=1, num_pages=POOL, seed=i), device)
        for i, (q_lens, kv_lens) in enumerate(whole)
    ]
    replay_prefill(steps, None, True, lambda _, now: now.expected(SCALE, causal=True)[0])
