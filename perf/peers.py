"""Libraries that we compare with, each behind adapters and used only if it can be imported; and ours.

An adapter turns a workload and its input sets into one call per set, or raises `UnavailableError` with the reason why
it cannot. Any other exception counts as a reason, too. A call returns o `[..., num_qo_heads, head_dim_vo]` with the
tokens of all requests in order; where o was scaled, with the factor that undoes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_attn
from perf.harness import Call
from perf.machine import flashinfer, module, require
from perf.workloads import BatchInputs, BatchWorkload

WORKSPACE_BYTES = 512 << 20
FLASHINFER_DIMS = (64, 128, 256)  # of prefill; dense fa2 of 80, 112 and 160 broke the CUDA context of an H200

PAGE_SIZE = 16  # of the cache of a single request, for kernels that take pages alone
PAGED = ("paged prefill", "speculative decode", "batch decode")

Bind = Callable[[Any, Sequence[Any]], list[Call]]  # takes a workload and its input sets


@dataclass(frozen=True)
class Peer:
    """Candidate for the workloads of `phases`. `builds`: it runs nvcc for minutes on first use."""

    name: str
    bind: Bind
    phases: tuple[str, ...]
    builds: bool = False


# ---- batches


def dense(w: BatchWorkload, x: BatchInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k, v viewed as `[batch_size, length, num_heads, head_dim]`."""
    require(w.equal, "requests differ in length")
    require(w.page_size == 0, "the cache is paged")
    require(w.kv_dtype == w.dtype, f"q is {w.dtype}, k and v are {w.kv_dtype}")
    batch_size = len(w.qo_lens)
    q, k, v = (t.view(batch_size, -1, *t.shape[1:]) for t in (x.q, x.k, x.v))
    return q, k, v


def sdpa(backend: SDPBackend, w: BatchWorkload, sets: Sequence[BatchInputs]) -> list[Call]:
    require(not w.causal or w.qo_lens == w.kv_lens, "torch aligns a causal mask top-left")
    require(w.window_left < 0 and not w.sinks, "its flash kernels take no window and no sinks")
    bound = [dense(w, x) for x in sets]
    grouped = w.num_qo_heads != w.num_kv_heads

    def call(*operands: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in operands)
        with sdpa_kernel([backend]):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=w.causal, enable_gqa=grouped)
        return o.transpose(1, 2)

    return [functools.partial(call, *x) for x in bound]


# Factors of what cuDNN rounds to e4m3: probabilities, at most 1, and outputs, which are about 0.01 in long rows.
P_SCALE, O_SCALE = 256.0, 64.0


def cudnn_fp8(w: BatchWorkload, sets: Sequence[BatchInputs]) -> list[Call]:
    """Binds cuDNN's graph of fp8 attention. On Hopper its output is fp8 too: calls return it with the factor that
    undoes its scale.
    """
    cudnn = module("cudnn")
    require(w.dtype == "e4m3", "its graph is for fp8 q, k and v")
    require(not w.causal or w.qo_lens == w.kv_lens, "on Hopper its causal mask is aligned top-left")
    require(w.window_left < 0 and not w.sinks, "it is bound without window and sinks")
    fp32, fp8 = cudnn.data_type.FLOAT, cudnn.data_type.FP8_E4M3
    graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32)
    q, k, v = (t.transpose(1, 2) for t in dense(w, sets[0]))
    operands = [graph.tensor(dim=t.shape, stride=t.stride(), data_type=fp8) for t in (q, k, v)]
    number = {"dim": (1, 1, 1, 1), "stride": (1, 1, 1, 1), "data_type": fp32}
    scales = {
        graph.tensor(**number): torch.full((1, 1, 1, 1), value, device=q.device)
        for value in (1.0, 1.0, 1.0, 1 / P_SCALE, P_SCALE, O_SCALE)  # of q, k, v, probabilities (twice), o
    }
    options = {"generate_stats": False, "attn_scale": w.head_dim**-0.5, "use_causal_mask": w.causal}
    o, _, *maxima = graph.sdpa_fp8(*operands, *scales, **options)
    o.set_output(True).set_dim(q.shape).set_stride(q.stride())
    for maximum in maxima:
        maximum.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(fp32)
        scales[maximum] = torch.empty((1, 1, 1, 1), device=q.device)
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=q.device)
    handle = cudnn.create_handle()

    def call(x: BatchInputs) -> tuple[torch.Tensor, float]:
        result = torch.empty_like(x.q)
        tensors = {**dict(zip(operands, (x.q, x.k, x.v), strict=True)), **scales, o: result}
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(tensors, workspace, handle=handle)
        return result, 1 / O_SCALE

    return [functools.partial(call, x) for x in sets]


def flash_attention_4(w: BatchWorkload, sets: Sequence[BatchInputs]) -> list[Call]:
    """Binds the dense function for ragged batches of equal requests, else the function of varied lengths."""
    require(w.kv_dtype == w.dtype, f"q is {w.dtype}, k and v are {w.kv_dtype}")
    fa4 = module("flash_attn.cute")
    calls = []
    for x in sets:
        options: dict[str, Any] = {"causal": w.causal or w.window_left >= 0}
        if w.window_left >= 0:
            options |= {"window_size": (w.window_left, 0)}
        if x.sinks is not None:
            options |= {"learnable_sink": x.sinks.bfloat16()}
        if w.equal and not w.page_size:
            calls.append(functools.partial(fa4.flash_attn_func, *dense(w, x), **options))
        else:
            q, lengths = _varied(w, x)
            calls.append(functools.partial(fa4.flash_attn_varlen_func, q, x.k, x.v, **lengths, **options))
    return [functools.partial(_first, call) for call in calls]


def _first(call: Call) -> torch.Tensor:
    o = call()
    return cast(torch.Tensor, o[0] if isinstance(o, tuple) else o)


def _varied(w: BatchWorkload, x: BatchInputs) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns q and the arguments that say which tokens belong to which request."""

    ints = functools.partial(torch.tensor, dtype=torch.int32, device=x.q.device)
    bounds: dict[str, Any] = {"max_seqlen_q": max(w.qo_lens), "max_seqlen_k": max(w.kv_lens)}
    if w.page_size:
        bounds |= {"seqused_k": ints(w.kv_lens), "page_table": block_table(w, x)}
    else:
        bounds["cu_seqlens_k"] = ints(w.kv_indptr)
    if w.equal:
        del bounds["max_seqlen_q"]
        return x.q.view(len(w.qo_lens), -1, *x.q.shape[1:]), bounds
    return x.q, {**bounds, "cu_seqlens_q": ints(w.qo_indptr)}


def planned(
    library: Any,
    w: BatchWorkload,
    sets: Sequence[BatchInputs],
    on_host: bool = False,
    plan_options: Mapping[str, Any] = MappingProxyType({}),
    **chosen: Any,
) -> list[Call]:
    """Binds the wrapper of `library`, FlashInfer or ours, for the phase of the workload; that of prefill also for
    speculative decoding. `on_host`: index arrays are, else on the GPU. `plan_options`: more arguments of plans.
    `chosen`: those of the wrapper.

    Sets of decode share one workspace, as in serving engines, where calls follow each other on one stream.
    """
    decode, paged = w.phase == "batch decode", w.page_size > 0
    kind = "DecodeWithPaged" if decode else "PrefillWithPaged" if paged else "PrefillWithRagged"
    options = {"window_left": w.window_left, "q_data_type": w.torch_dtype, "kv_data_type": w.torch_kv_dtype}
    options |= {} if decode else {"causal": w.causal}
    options |= {} if paged else {"head_dim_vo": w.head_dim_vo}
    options |= {} if decode or w.torch_dtype.itemsize > 1 else {"o_data_type": torch.bfloat16}
    shared = None if paged and not decode else _workspace(sets)

    def plan(x: BatchInputs) -> Any:
        workspace = _workspace(sets) if shared is None else shared
        wrapper = getattr(library, f"Batch{kind}KVCacheWrapper")(workspace, "NHD", **chosen)
        ints = functools.partial(torch.tensor, dtype=torch.int32, device="cpu" if on_host else x.q.device)
        *bounds, last = map(ints, (w.qo_indptr, w.kv_indptr, w.last_page_len if paged else ()))
        pages, page_size = ([x.indices, last], [w.page_size]) if paged else ([], [])
        sizes = w.num_qo_heads, w.num_kv_heads, w.head_dim, *page_size
        wrapper.plan(*bounds[decode:], *pages, *sizes, **options, **plan_options)
        return wrapper

    wrappers = [plan(x) for x in sets] if paged else [plan(sets[0])] * len(sets)  # each set has its own page ids
    scales = () if decode else _head_scales(w, sets[0])
    return [
        functools.partial(wrapper.run, x.q, *(((x.k, x.v),) if paged else (x.k, x.v)), *scales, **extras(x))
        for wrapper, x in zip(wrappers, sets, strict=True)
    ]


def _head_scales(w: BatchWorkload, x: BatchInputs) -> tuple[torch.Tensor, ...]:
    """Returns one scale per head of fp8 queries, keys and values, all 1; nothing for 16-bit queries."""
    if w.torch_dtype.itemsize > 1:
        return ()
    heads = w.num_qo_heads, w.num_kv_heads, w.num_kv_heads
    return tuple(torch.ones(n, dtype=torch.float32, device=x.q.device) for n in heads)


def extras(x: BatchInputs) -> dict[str, Any]:
    """Returns the arguments that only some workloads need: of NVFP4 caches, and sinks."""
    found = {"kv_cache_sf": x.block_scales, "sinks": x.sinks}
    return {name: value for name, value in found.items() if value is not None}


def flashinfer_prefill(backend: str, w: BatchWorkload, sets: Sequence[BatchInputs]) -> list[Call]:
    require(w.head_dim in FLASHINFER_DIMS, "its kernels of other head dims than 64, 128, 256 end in illegal accesses")
    require(not w.sinks, "its prefill wrappers take sinks by JIT variants alone")
    return planned(flashinfer("flashinfer"), w, sets, backend=backend)


def flashinfer_decode(w: BatchWorkload, sets: Sequence[BatchInputs]) -> list[Call]:
    require(not w.sinks, "its decode wrapper ignores sinks")
    return planned(flashinfer("flashinfer"), w, sets, use_tensor_cores=True)


def flashinfer_xqa(w: BatchWorkload, sets: Sequence[BatchInputs]) -> list[Call]:
    return xqa(flashinfer("flashinfer.decode").xqa_batch_decode_with_kv_cache, w, sets)


def our_xqa(w: BatchWorkload, sets: Sequence[BatchInputs], cache: Any = None, **chosen: Any) -> list[Call]:
    return xqa(cute_attn.xqa_batch_decode_with_kv_cache, w, sets, cache, **chosen)


def xqa(decode: Any, w: BatchWorkload, sets: Sequence[BatchInputs], cache: Any = None, **chosen: Any) -> list[Call]:
    """Binds `xqa_batch_decode_with_kv_cache` of FlashInfer or ours. `cache`: None for k and v of the sets. `chosen`:
    more of its arguments.
    """
    require(w.equal or max(w.qo_lens) == 1, "requests differ in query tokens")
    device = sets[0].q.device
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    lengths = torch.tensor(w.kv_lens, dtype=torch.int32, device=device).view(torch.uint32)
    options = {"bmm1_scale": w.head_dim**-0.5, "window_left": w.window_left, "kv_layout": "NHD", **chosen}
    if (q_len := w.qo_lens[0]) > 1:
        options |= {"q_len_per_req": q_len, "mask": _draft_mask(len(w.qo_lens), q_len).to(device)}

    def call(x: BatchInputs) -> Call:
        kv = (x.k, x.v) if cache is None else cache
        arguments = x.q, kv, workspace, block_table(w, x), lengths, max(w.kv_lens)
        return functools.partial(decode, *arguments, **options, **extras(x))

    return [call(x) for x in sets]


def _draft_mask(requests: int, q_len: int) -> torch.Tensor:
    """Returns causal bits of the query tokens: uint16 `[requests, q_len, 2 * ceil(q_len / 32)]`."""
    words = 2 * -(-q_len // 32)
    rows = [[((2 << row) - 1) >> (16 * word) & 0xFFFF for word in range(words)] for row in range(q_len)]
    return torch.tensor(rows, dtype=torch.int32).to(torch.uint16).expand(requests, -1, -1).contiguous()


def block_table(w: BatchWorkload, x: BatchInputs) -> torch.Tensor:
    """Returns the page table, int32 `[batch_size, max_num_pages]`, with 0 after the last page of a request."""
    assert x.indices is not None
    table = torch.zeros(len(w.kv_lens), max(map(w.pages, w.kv_lens)), dtype=torch.int32, device=x.q.device)
    for row, begin, end in zip(table, w.kv_indptr, w.kv_indptr[1:], strict=False):
        row[: end - begin] = x.indices[begin:end]
    return table


def _workspace(sets: Sequence[BatchInputs]) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=sets[0].q.device)


# ---- single requests: the functions for them, or those for batches


def in_pages(bind: Bind, w: BatchWorkload, sets: Sequence[BatchInputs]) -> list[Call]:
    """Binds an adapter for paged caches, for a batch of one, whose pages are in order."""
    kv_len = w.kv_lens[0]
    require(kv_len % PAGE_SIZE == 0, f"kv_len must be a multiple of the page size {PAGE_SIZE}, got {kv_len}")
    pages = torch.arange(kv_len // PAGE_SIZE, dtype=torch.int32, device=sets[0].q.device)
    kv = ([t.unflatten(0, (-1, PAGE_SIZE)) for t in (x.k, x.v)] for x in sets)
    paged = [BatchInputs(x.q, k, v, pages) for x, (k, v) in zip(sets, kv, strict=True)]
    return bind(dataclasses.replace(w, single=False, page_size=PAGE_SIZE), paged)


def of_library(library: Any, w: BatchWorkload, sets: Sequence[BatchInputs], **chosen: Any) -> list[Call]:
    """Binds the functions of `library`, FlashInfer or ours, for single requests."""
    if w.phase == "prefill":
        prefill = library.single_prefill_with_kv_cache
        return [functools.partial(prefill, x.q, x.k, x.v, causal=w.causal, **chosen) for x in sets]

    def decode(x: BatchInputs) -> torch.Tensor:
        o = library.single_decode_with_kv_cache(x.q[0], x.k, x.v, **chosen)
        return cast(torch.Tensor, o)[None]

    return [functools.partial(decode, x) for x in sets]


def flashinfer_single(w: BatchWorkload, sets: Sequence[BatchInputs], **chosen: Any) -> list[Call]:
    return of_library(flashinfer("flashinfer"), w, sets, **chosen)


ours, our_single = functools.partial(planned, cute_attn), functools.partial(of_library, cute_attn)


def _peers() -> tuple[Peer, ...]:
    partial, single, ragged = functools.partial, ("prefill", "decode"), "ragged prefill"
    cudnn, flash = (partial(sdpa, backend) for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))
    return (
        Peer("torch cuDNN", cudnn, (*single, ragged)),
        Peer("torch flash", flash, single),
        Peer("flash-attn-4", flash_attention_4, (*single, ragged, *PAGED)),
        Peer("FlashInfer fa2", partial(flashinfer_single, backend="fa2"), ("prefill",), builds=True),
        Peer("FlashInfer fa3", partial(flashinfer_single, backend="fa3"), ("prefill",), builds=True),
        Peer("FlashInfer decode", partial(flashinfer_single, use_tensor_cores=False), ("decode",), builds=True),
        Peer("FlashInfer decode tc", partial(flashinfer_single, use_tensor_cores=True), ("decode",), builds=True),
        Peer("FlashInfer paged fa2", partial(in_pages, flashinfer_decode), ("decode",), builds=True),
        Peer("FlashInfer XQA", partial(in_pages, flashinfer_xqa), ("decode",), builds=True),
        Peer("cuDNN fp8", cudnn_fp8, (ragged,)),
        Peer("FlashInfer fa2", partial(flashinfer_prefill, "fa2"), (ragged, *PAGED[:2]), builds=True),
        Peer("FlashInfer fa3", partial(flashinfer_prefill, "fa3"), (ragged, *PAGED[:2]), builds=True),
        Peer("FlashInfer fa2", flashinfer_decode, ("batch decode",), builds=True),
        Peer("FlashInfer XQA", flashinfer_xqa, PAGED[1:], builds=True),
    )


PEERS = _peers()
