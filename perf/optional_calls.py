"""Calls with tensors that most calls lack (masks, sinks, scales, outputs), and with other lengths every time, whose
host time is measured: `perf.overhead`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import torch

import cute_attn
from perf import batch_peers
from perf.batch_workloads import BatchWorkload, equal
from perf.harness import Call
from perf.workloads import Workload

SINGLE = Workload(128, 512, 32, 8, 128, 128)
DECODE = equal(16, 1, 117, (32, 8), 128, 16)
PREFILL = equal(16, 32, 117, (32, 8), 128, 16, causal=True)
DECODES = {  # without a plan
    "batch 16": DECODE,
    "sinks": dataclasses.replace(DECODE, sinks=True),
    "mask of drafts": equal(16, 2, 117, (32, 8), 128, 16, causal=True),
    "NVFP4": equal(16, 1, 117, (32, 8), 128, 16, kv_dtype="nvfp4"),
}


def optional_calls(device: torch.device) -> dict[str, Call]:
    """Returns single calls and runs of wrappers, each kind also without such tensors."""
    sinks, scale = torch.zeros(SINGLE.num_qo_heads, device=device), torch.full((), 0.5, device=device)
    tensors: dict[str, dict[str, Any]] = {
        "plain": {},
        "sinks": {"sinks": sinks},
        "scale tensors": {"k_scale": scale, "v_scale": scale},
    }
    q, k, v = SINGLE.inputs(device)
    kinds: dict[str, Any] = {
        "single_prefill": functools.partial(cute_attn.single_prefill_with_kv_cache, q, k, v, causal=True),
        "single_decode": functools.partial(cute_attn.single_decode_with_kv_cache, q[0], k, v),
        "decode run": run(DECODE, device),
        "paged prefill run": run(PREFILL, device),
    }
    calls = {f"{kind}, {n}": functools.partial(kinds[kind], **tensors[n]) for kind in kinds for n in tensors}
    bits = torch.full((SINGLE.qo_len * SINGLE.kv_len // 8,), 0x5F, dtype=torch.uint8, device=device)
    calls["single_prefill, packed mask"] = functools.partial(kinds["single_prefill"], packed_custom_mask=bits)
    lengths = itertools.cycle(range(2, SINGLE.kv_len))

    def other_length() -> None:
        n = next(lengths)
        cute_attn.single_prefill_with_kv_cache(q, k[:n], v[:n])

    rows = sum(DECODE.qo_lens), DECODE.num_qo_heads, DECODE.head_dim
    out = torch.empty(rows, dtype=DECODE.torch_dtype, device=device)
    return {
        **calls,
        "single_prefill, another kv_len each": other_length,
        "decode run, out": functools.partial(kinds["decode run"], out=out),
        "paged prefill run, custom mask": masked_run(PREFILL, device),
    }


def run(w: BatchWorkload, device: torch.device) -> Call:
    return batch_peers.ours("auto", w, [w.inputs(device)])[0]


def masked_run(w: BatchWorkload, device: torch.device) -> Call:
    """Returns a run of a plan with a custom mask."""
    x = w.inputs(device)
    mask = torch.arange(sum(n * m for n, m in zip(w.qo_lens, w.kv_lens, strict=True)), device=device) % 5 > 0
    wrapper = cute_attn.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(batch_peers.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    )
    qo_indptr, kv_indptr, last = (
        torch.tensor(n, dtype=torch.int32) for n in (w.qo_indptr, w.kv_indptr, w.last_page_len)
    )
    sizes = w.num_qo_heads, w.num_kv_heads, w.head_dim, w.page_size
    assert x.indices is not None
    wrapper.plan(qo_indptr, kv_indptr, x.indices, last, *sizes, custom_mask=mask, q_data_type=w.torch_dtype)
    return functools.partial(wrapper.run, x.q, (x.k, x.v))


def unplanned_optional_calls(device: torch.device) -> dict[str, Call]:
    """Returns decode calls without a plan."""
    calls = {f"xqa, {name}": batch_peers.our_xqa(w, [w.inputs(device)])[0] for name, w in DECODES.items()}
    x, scale = DECODE.inputs(device), torch.full((), 0.1, device=device)
    table = batch_peers.block_table(DECODE, x)
    lengths = torch.tensor(DECODE.kv_lens, dtype=torch.int32, device=device)
    workspace = torch.zeros(batch_peers.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    scaled = functools.partial(
        cute_attn.xqa_batch_decode_with_kv_cache, x.q, (x.k, x.v), workspace, table, lengths, max(DECODE.kv_lens)
    )
    lse = torch.empty(len(DECODE.kv_lens), DECODE.num_qo_heads, device=device)
    more = {"bmm1_scale": scale, "bmm2_scale": scale, "lse": lse, "return_lse": True}
    return {**calls, "xqa, scale tensors and lse": functools.partial(scaled, **more)}
