"""What else callers use: appends, mixed batches, shared prefixes, sparse blocks, sink variants, XQA itself.

FlashInfer's documents and tests have these forms; TensorRT-LLM's backend appends and plans as `test_append_and_attend`.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import attention, cascade, quantization, sparse
from tests.support.engine_case import (
    BF16,
    Batch,
    Tokens,
    assert_close,
    assert_lse,
    attend,
    draft_mask,
    ends,
    nvfp4_cache,
    workspace,
)

SCALE = 0.11
SINKS = (0.5, -1.0, 2.0, 0.0)
MIXED = Batch((7, 1, 20), (30, 17, 20))
FP16 = torch.float16


def plan(wrapper: Any, tokens: Tokens, **changes: Any) -> None:
    batch = tokens.batch
    where = (tokens.qo_indptr, tokens.kv_indptr, tokens.kv_indices, tokens.last_page_len)
    options = {"causal": True, "sm_scale": SCALE, "q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype}
    wrapper.plan(*where, *batch.heads, batch.dim, batch.page_size, **{**options, **changes})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_and_attend(layout: str, device: str) -> None:
    """New tokens go to the pages of their requests; then contexts and single tokens are attended by a wrapper each."""
    tokens = Tokens(Batch((9, 12, 1, 1), (20, 12, 33, 1)), device)
    batch, old = tokens.batch, tokens.caches(layout)
    bounds, indptr = tokens.qo_indptr.to(device), tokens.kv_indptr.to(device)
    last = tokens.last_page_len.to(device)
    seq_lens = cute_attn.get_seq_lens(indptr, last, batch.page_size)
    where = cute_attn.get_batch_indices_positions(bounds, seq_lens, len(tokens.q))
    new = [
        torch.cat([x[len(x) - n :] for x, n in zip(side, batch.q_lens, strict=True)]).to(BF16).to(device)
        for side in (tokens.keys, tokens.values)
    ]
    cache = tuple(x.clone() for x in old)
    for target in cache:  # the new tokens are not there yet
        rows = target if layout == "NHD" else target.transpose(1, 2)
        for slots, n in zip(tokens.slots, batch.q_lens, strict=True):
            rows[slots[len(slots) - n :] // batch.page_size, slots[len(slots) - n :] % batch.page_size] = math.nan
    cute_attn.page.append_paged_kv_cache(
        append_key=new[0],
        append_value=new[1],
        batch_indices=where[0],
        positions=where[1],
        paged_kv_cache=cache,
        kv_indices=tokens.kv_indices,
        kv_indptr=indptr,
        kv_last_page_len=last,
        kv_layout=layout,
    )
    out = torch.empty_like(tokens.q)
    prefill = cute_attn.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout, backend="auto")
    split = int(tokens.kv_indptr[2])
    options = {"sm_scale": SCALE, "q_data_type": BF16, "kv_data_type": BF16}
    prefill.plan(*(bounds[:3], indptr[:3], tokens.kv_indices[:split], last[:2], 4, 2, 128, 16), causal=True, **options)
    prefill.run(tokens.q[:21], cache, out=out[:21])
    decode = cute_attn.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout, use_tensor_cores=True)
    decode.plan(indptr[2:] - indptr[2], tokens.kv_indices[split:], last[2:], 4, 2, 128, 16, **options)
    decode.run(tokens.q[21:], cache, out=out[21:])
    assert_close(out, tokens.expected(SCALE, causal=True)[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batch_attention(layout: str, device: str) -> None:
    """Prefill and decode in one call, with lengths instead of last pages; the result is always a pair."""
    tokens = Tokens(MIXED, device)
    wrapper = attention.BatchAttention(kv_layout=layout, device=device)
    where = (tokens.qo_indptr, tokens.kv_indptr, tokens.kv_indices, tokens.seq_lens)
    wrapper.plan(
        *(x.to(device) for x in where),
        *(4, 2, 128, 128, 16),
        causal=True,
        sm_scale=SCALE,
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    expected = tokens.expected(SCALE, causal=True)
    out, lse = wrapper.run(tokens.q, tokens.caches(layout))
    assert_close(out, expected[0])
    assert_lse(lse, expected[1])
    buffers = torch.empty_like(tokens.q), torch.empty_like(lse)
    found = wrapper.run(tokens.q, tokens.caches(layout), out=buffers[0], lse=buffers[1], k_scale=0.5, v_scale=2.0)
    assert found[0] is buffers[0]
    assert found[1] is buffers[1]
    assert_close(found[0], tokens.expected(SCALE * 0.5, causal=True, v_scale=2.0)[0])


def test_batch_attention_with_a_soft_cap(device: str) -> None:
    tokens = Tokens(MIXED, device)
    wrapper = attention.BatchAttention(device=device)
    where = (tokens.qo_indptr, tokens.kv_indptr, tokens.kv_indices, tokens.seq_lens)
    wrapper.plan(*(x.to(device) for x in where), 4, 2, 128, 128, 16, logits_soft_cap=2.0)
    out, _ = wrapper.run(tokens.q, tokens.caches(), logits_soft_cap=2.0)
    assert_close(out, tokens.expected(128**-0.5, soft_cap=2.0)[0])


def shared(tokens: Tokens, length: int) -> tuple[list[torch.Tensor], Tokens]:
    """A prefix of all requests, and the tokens with it in front."""
    generator = torch.Generator().manual_seed(9)
    prefix = [torch.randn(length, 2, tokens.batch.dim, generator=generator).to(FP16).double() for _ in range(2)]
    sides = ([torch.cat((p, x)) for x in side] for p, side in zip(prefix, (tokens.keys, tokens.values), strict=True))
    longer = Batch(tokens.batch.q_lens, [n + length for n in tokens.batch.kv_lens], dtype=FP16, kv_dtype=FP16)
    whole = Tokens(longer, tokens.device, *sides)
    whole.q, whole.queries = tokens.q, tokens.queries
    return [p.to(FP16).to(tokens.device) for p in prefix], whole


def test_decode_of_a_shared_prefix(device: str) -> None:
    tokens = Tokens(Batch((1, 1, 1), (33, 1, 20), dtype=FP16, kv_dtype=FP16), device)
    prefix, whole = shared(tokens, 40)
    wrapper = cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), "NHD")
    where = (tokens.kv_indptr.to(device), tokens.kv_indices, tokens.last_page_len.to(device))
    wrapper.begin_forward(*where, 4, 2, 128, 16, data_type=FP16)
    out = wrapper.forward(tokens.q, *prefix, tokens.caches())
    assert_close(out, whole.expected(128**-0.5)[0], 2e-3)


def test_prefill_of_a_shared_prefix(device: str) -> None:
    tokens = Tokens(Batch(MIXED.q_lens, MIXED.kv_lens, dtype=FP16, kv_dtype=FP16), device)
    prefix, whole = shared(tokens, 40)
    wrapper = cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), "HND")
    where = (tokens.qo_indptr, tokens.kv_indptr, tokens.kv_indices, tokens.last_page_len)
    wrapper.begin_forward(*(x.to(device) for x in where), 4, 2, 128, 16)
    hnd = [p.transpose(0, 1).contiguous() for p in prefix]
    out = wrapper.forward(tokens.q, *hnd, tokens.caches("HND"), causal=True, sm_scale=SCALE)
    assert_close(out, whole.expected(SCALE, causal=True)[0], 2e-3)


@pytest.mark.parametrize("with_mask", [False, True], ids=["", "mask"])
def test_block_sparse_attention(with_mask: bool, device: str) -> None:
    """Blocks of 16 rows and 8 columns, of which some rows have none."""
    blocks = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1]], dtype=torch.bool)
    rows, columns = 48, 40
    tokens = Tokens(Batch((rows,), (columns,)), device)
    indices = torch.cat([row.nonzero()[:, 0] for row in blocks]).int()
    inside = torch.rand(len(indices), 16, 8, generator=torch.Generator().manual_seed(1)) < 0.6
    keep = blocks.repeat_interleave(16, 0).repeat_interleave(8, 1)
    if with_mask:
        places = blocks.nonzero().tolist()
        for (i, j), part in zip(places, inside, strict=True):
            keep[16 * i : 16 * i + 16, 8 * j : 8 * j + 8] &= part
    wrapper = sparse.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(
        ends(blocks.sum(1).tolist()).to(device),
        indices.to(device),
        *(rows, columns, 16, 8, 4, 2, 128),
        mask=inside.to(device) if with_mask else None,
        sm_scale=SCALE,
        q_data_type=BF16,
        o_data_type=BF16,
    )
    expected = tokens.expected(SCALE, keep=[keep])
    out, lse = wrapper.run(tokens.q, *tokens.ragged(), return_lse=True)
    assert_close(out, expected[0])
    assert_lse(lse, expected[1])


def test_variable_blocks(device: str) -> None:
    """Blocks of any size, other ones for each kv head; heads come first."""
    row_sizes, column_sizes = torch.tensor([[20, 5, 23], [1, 40, 7]]), torch.tensor([[16, 9, 30, 1], [5, 5, 40, 6]])
    blocks = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(2)) < 0.6
    tokens = Tokens(Batch((48,), (56,)), device)
    wrapper = sparse.VariableBlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(
        blocks.to(device),
        row_sizes.int().to(device),
        column_sizes.int().to(device),
        *(4, 2, 128),
        sm_scale=SCALE,
        q_data_type=BF16,
    )
    q, k, v = (x.transpose(0, 1).contiguous() for x in (tokens.q, *tokens.ragged()))
    out = wrapper.run(q, k, v)
    for head in range(4):
        kv = head // 2
        keep = blocks[kv].repeat_interleave(row_sizes[kv], 0).repeat_interleave(column_sizes[kv], 1)
        one = (x[0][:, i : i + 1] for x, i in ((tokens.queries, head), (tokens.keys, kv), (tokens.values, kv)))
        assert_close(out[head][:, None], attend(*one, SCALE, keep=keep)[0])


# ---- sinks as FlashInfer's own tests pass them


def test_sink_variant(device: str) -> None:
    """The variant that FlashInfer compiles; sinks and scale follow the cache by position."""
    tokens, sinks = Tokens(MIXED, device), torch.tensor(SINKS, device=device)
    jit_args = ["batch_prefill_attention_sink", BF16, BF16, BF16, torch.int32, 128, 128]
    jit_args += [["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", "struct AttentionSink {};"]
    wrapper = cute_attn.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), "NHD", backend="auto", jit_args=jit_args, jit_kwargs={"use_sliding_window": False}
    )
    plan(wrapper, tokens, sm_scale=None)
    out = wrapper.run(tokens.q, tokens.caches(), sinks, SCALE)
    assert_close(out, tokens.expected(SCALE, causal=True, sinks=sinks)[0])


def test_other_variants_are_refused(device: str) -> None:
    jit_args = ["mine", BF16, BF16, BF16, torch.int32, 128, 128, [], [], [], [], "Mine", "struct Mine {};"]
    with pytest.raises(NotImplementedError, match="jit_args"):
        cute_attn.BatchPrefillWithPagedKVCacheWrapper(workspace(device), jit_args=jit_args)


# ---- lse, lengths


@pytest.mark.parametrize("base", ["log2", "ln"])
@pytest.mark.parametrize("layout", ["NH", "HN"])
@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_base_and_layout_of_the_lse(kind: str, layout: str, base: str, device: str) -> None:
    """Both are arguments of `run`; a buffer of the caller has the layout too."""
    tokens = Tokens(Batch((9, 20), (9, 20)), device)
    if kind == "paged":
        wrapper: Any = cute_attn.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        plan(wrapper, tokens)
        tensors: tuple[Any, ...] = (tokens.q, tokens.caches())
    else:
        wrapper = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
        bounds = (tokens.qo_indptr, tokens.token_indptr)
        wrapper.plan(*bounds, 4, 2, 128, causal=True, sm_scale=SCALE, q_data_type=BF16)
        tensors = (tokens.q, *tokens.ragged())
    expected = tokens.expected(SCALE, causal=True)[1] * (math.log(2) if base == "ln" else 1.0)
    expected = expected.T.contiguous() if layout == "HN" else expected
    _, lse = wrapper.run(*tensors, return_lse=True, lse_base=base, lse_layout=layout)
    assert_lse(lse, expected)
    buffer = torch.full_like(lse, 7.0).contiguous()
    found = wrapper.run(*tensors, return_lse=True, lse=buffer, lse_base=base, lse_layout=layout)
    assert found[1].data_ptr() == buffer.data_ptr()
    assert_lse(buffer, expected)
    _, plain = wrapper.run(*tensors, return_lse=True)
    assert_lse(plain, tokens.expected(SCALE, causal=True)[1])


@pytest.mark.parametrize("promise", [None, 3, -1, 4])
def test_uniform_query_lengths(promise: int | None, device: str) -> None:
    """A promise for captured launches; one that does not describe the batch warns, as in FlashInfer."""
    tokens = Tokens(Batch((3, 3, 3), (30, 17, 20)), device)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 4, 20, 3)]
    wrapper = cute_attn.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    with pytest.warns(match="uniform_q_len=4") if promise == 4 else contextlib.nullcontext():
        plan(wrapper, tokens, uniform_q_len=promise)
    assert_close(wrapper.run(tokens.q, tokens.caches()), tokens.expected(SCALE, causal=True)[0])


# ---- NVFP4, XQA


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_dequantised_pages(layout: str, device: str) -> None:
    """Into tensors of the caller, where slots past a request's length stay as they are."""
    tokens = Tokens(MIXED, device)
    data, scales, held = nvfp4_cache(tokens, layout)
    k, v = (torch.full((3, 40, 2, 128), 7.0, dtype=BF16, device=device) for _ in range(2))
    factors = (torch.tensor([x], device=device) for x in (0.002, 0.003))
    quantization.nvfp4_kv_dequantize_paged(
        data, scales, tokens.block_tables(4), tokens.seq_lens, *factors, k, v, kv_layout=layout
    )
    for found, side in ((k, held.keys), (v, held.values)):
        for row, stored in zip(found.cpu(), side, strict=True):
            torch.testing.assert_close(row[: len(stored)].double(), stored, rtol=2**-8, atol=1e-9)
            assert bool((row[len(stored) :] == 7).all())


@pytest.mark.parametrize("words", [12, 2 << 20], ids=["few", "8MiB"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_xqa_itself(words: int, q_len: int, device: str) -> None:
    """`cute_attn.xqa` is the function and the module, as in FlashInfer; its semaphores may be few."""
    tokens = Tokens(Batch((q_len,) * 2, (33, 70)), device)
    shape = (2, 1, 4, 128) if q_len == 1 else (2, 1, q_len, 4, 128)
    q, output = tokens.q.view(shape), torch.empty(shape, dtype=BF16, device=device)
    mask = None if q_len == 1 else draft_mask([q_len] * 2, q_len, True).view(2, q_len, 2).to(device)
    for function in (cute_attn.xqa, cute_attn.xqa.xqa):
        output.fill_(7.0)
        function(
            q,
            *tokens.caches("HND"),
            tokens.block_tables(8),
            tokens.seq_lens.to(torch.uint32)[:, None],
            output,
            workspace(device, 32),
            torch.zeros(words, dtype=torch.uint32, device=device),
            2,
            16,
            sinks=torch.tensor(SINKS, device=device).view(2, 2),
            q_scale=SCALE * math.sqrt(128),
            kv_scale=1.0,
            sliding_win_size=0,
            kv_layout="HND",
            q_seq_len=q_len,
            mask=mask,
        )
        expected = tokens.expected(SCALE, causal=True, sinks=torch.tensor(SINKS))[0]
        assert_close(output.view(tokens.q.shape), expected)


# ---- single requests


def test_single_functions(device: str) -> None:
    """A vision tower and a small decoder: one call each, with their numbers as keywords."""
    tokens = Tokens(Batch((9,), (40,)), device)
    k, v = tokens.ragged()
    out, lse = cute_attn.single_prefill_with_kv_cache_return_lse(tokens.q, k, v, causal=True, sm_scale=SCALE)
    expected = tokens.expected(SCALE, causal=True)
    assert_close(out, expected[0])
    assert_lse(lse, expected[1])
    one = cute_attn.single_decode_with_kv_cache(tokens.q[8], k, v, sm_scale=SCALE, logits_soft_cap=2.0)
    found = attend(tokens.queries[0][8:], tokens.keys[0], tokens.values[0], SCALE, soft_cap=2.0)[0]
    assert_close(one[None], found)
