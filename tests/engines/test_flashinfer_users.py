"""What else callers use: appends, caches with strides of their own, XQA itself.

FlashInfer's documents and tests have these forms; TensorRT-LLM's backend appends and plans as `test_append_and_attend`.
"""

from __future__ import annotations

import math

import pytest
import torch

import cute_attn
from tests.support.engine_case import (
    BF16,
    Batch,
    Tokens,
    assert_close,
    draft_mask,
    workspace,
)

SCALE = 0.11
SINKS = (0.5, -1.0, 2.0, 0.0)


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


# ---- caches, XQA


def test_k_and_v_may_have_strides_of_their_own(device: str) -> None:
    """FlashInfer's decode says that they "must have identical strides"; here nothing needs that."""
    tokens = Tokens(Batch((1, 1), (33, 70)), device)
    k, v = tokens.caches()
    apart = torch.full((len(v), 20, 2, 128), math.nan, dtype=BF16, device=device)[:, :16]
    apart.copy_(v)
    assert k.stride() != apart.stride()
    wrapper = cute_attn.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    where = (tokens.kv_indptr, tokens.kv_indices, tokens.last_page_len, 4, 2, 128, 16)
    wrapper.plan(*where, q_data_type=BF16, sm_scale=SCALE)
    assert_close(wrapper.run(tokens.q, (k, apart)), tokens.expected(SCALE)[0])


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
