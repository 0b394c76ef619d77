"""Libraries that we compare with, each behind one adapter and used only if it can be imported.

An adapter turns a workload and its input sets into one call per set, which returns o
`[tokens, num_qo_heads, head_dim_vo]`, or raises `UnavailableError` with the reason why it cannot. Any other exception
counts as a reason, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from perf import batch_peers
from perf.harness import Call
from perf.machine import flashinfer, module, require
from perf.workloads import Inputs, Workload

Bind = Callable[[Any, Sequence[Any]], list[Call]]  # takes a workload and its input sets

PAGE_SIZE = 16
PAGED = ("paged prefill", "speculative decode", "batch decode")
WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Peer:
    """Candidate for the workloads of `phases`. `builds`: it runs nvcc for minutes on first use."""

    name: str
    bind: Bind
    phases: tuple[str, ...] = ("prefill", "decode")
    builds: bool = False


def _sdpa(backend: SDPBackend, w: Workload, sets: Sequence[Inputs]) -> list[Call]:
    require(not w.causal or w.qo_len == w.kv_len, "torch aligns a causal mask top-left")

    def call(x: Inputs) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in x)
        grouped = w.num_qo_heads != w.num_kv_heads
        with sdpa_kernel([backend]):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=w.causal, enable_gqa=grouped)
        return o[0].transpose(0, 1)

    return [functools.partial(call, x) for x in sets]


def _flash_attention_4(w: Workload, sets: Sequence[Inputs]) -> list[Call]:
    fa4 = module("flash_attn.cute")

    def call(x: Inputs) -> torch.Tensor:
        o = fa4.flash_attn_func(x.q[None], x.k[None], x.v[None], causal=w.causal)
        return (o[0] if isinstance(o, tuple) else o)[0]

    return [functools.partial(call, x) for x in sets]


def _flashinfer_prefill(backend: str, w: Workload, sets: Sequence[Inputs]) -> list[Call]:
    prefill = flashinfer("flashinfer").single_prefill_with_kv_cache
    return [functools.partial(prefill, *x, causal=w.causal, backend=backend) for x in sets]


def _flashinfer_decode(use_tensor_cores: bool, w: Workload, sets: Sequence[Inputs]) -> list[Call]:
    decode = flashinfer("flashinfer").single_decode_with_kv_cache

    def call(x: Inputs) -> torch.Tensor:
        return decode(x.q[0], x.k, x.v, use_tensor_cores=use_tensor_cores)[None]

    return [functools.partial(call, x) for x in sets]


def _paged(w: Workload, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the dense cache viewed as pages in order: `[num_pages, PAGE_SIZE, num_kv_heads, head_dim]`."""
    require(w.kv_len % PAGE_SIZE == 0, f"kv_len must be a multiple of the page size {PAGE_SIZE}, got {w.kv_len}")
    k, v = (t.view(-1, PAGE_SIZE, *t.shape[1:]) for t in (x.k, x.v))
    return k, v


def _flashinfer_paged_decode(w: Workload, sets: Sequence[Inputs]) -> list[Call]:
    """Binds the batch wrapper with the tensor-core kernel, for a batch of one request."""
    caches = [_paged(w, x) for x in sets]
    library = flashinfer("flashinfer")
    device, num_pages = sets[0].q.device, w.kv_len // PAGE_SIZE
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.tensor([0, num_pages], dtype=torch.int32),
        torch.arange(num_pages, dtype=torch.int32, device=device),
        torch.tensor([PAGE_SIZE], dtype=torch.int32),
        w.num_qo_heads,
        w.num_kv_heads,
        w.head_dim_qk,
        PAGE_SIZE,
        q_data_type=w.torch_dtype,
        kv_data_type=w.torch_dtype,
    )
    return [functools.partial(wrapper.run, x.q, cache) for x, cache in zip(sets, caches, strict=True)]


def _flashinfer_xqa(w: Workload, sets: Sequence[Inputs]) -> list[Call]:
    caches = [_paged(w, x) for x in sets]
    xqa = flashinfer("flashinfer.decode").xqa_batch_decode_with_kv_cache
    device, num_pages = sets[0].q.device, w.kv_len // PAGE_SIZE
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    table = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([w.kv_len], dtype=torch.uint32, device=device)

    def call(q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scale = w.head_dim_qk**-0.5
        return xqa(q, cache, workspace, table, lengths, w.kv_len, bmm1_scale=scale, kv_layout="NHD")

    return [functools.partial(call, x.q, cache) for x, cache in zip(sets, caches, strict=True)]


PEERS: tuple[Peer, ...] = (
    Peer("torch cuDNN", functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    Peer("torch flash", functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    Peer("flash-attn-4", _flash_attention_4),
    Peer("FlashInfer fa2", functools.partial(_flashinfer_prefill, "fa2"), ("prefill",), builds=True),
    Peer("FlashInfer fa3", functools.partial(_flashinfer_prefill, "fa3"), ("prefill",), builds=True),
    Peer("FlashInfer decode", functools.partial(_flashinfer_decode, False), ("decode",), builds=True),
    Peer("FlashInfer decode tc", functools.partial(_flashinfer_decode, True), ("decode",), builds=True),
    Peer("FlashInfer paged fa2", _flashinfer_paged_decode, ("decode",), builds=True),
    Peer("FlashInfer XQA", _flashinfer_xqa, ("decode",), builds=True),
    Peer("torch cuDNN", functools.partial(batch_peers.sdpa, SDPBackend.CUDNN_ATTENTION), ("ragged prefill",)),
    Peer("flash-attn-4", batch_peers.flash_attention_4, ("ragged prefill", *PAGED)),
    Peer("FlashInfer fa2", functools.partial(batch_peers.flashinfer_ragged, "fa2"), ("ragged prefill",), builds=True),
    Peer("FlashInfer fa3", functools.partial(batch_peers.flashinfer_ragged, "fa3"), ("ragged prefill",), builds=True),
    Peer("FlashInfer fa2", functools.partial(batch_peers.flashinfer_paged, "fa2"), PAGED[:2], builds=True),
    Peer("FlashInfer fa3", functools.partial(batch_peers.flashinfer_paged, "fa3"), PAGED[:2], builds=True),
    Peer("FlashInfer fa2", batch_peers.flashinfer_decode, ("batch decode",), builds=True),
    Peer("FlashInfer XQA", batch_peers.flashinfer_xqa, PAGED[1:], builds=True),
)
