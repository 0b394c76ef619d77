"""Shapes and dtypes of what operators return, from the arguments of the public functions, by name.

Outputs that the caller gave, and an lse that nobody asked for, are empty tensors. Axes that are unknown while a graph
is traced stay symbolic: nothing here looks at a number that may be one.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.request.settings import FP8

Arguments = dict[str, Any]
Pair = tuple[torch.Tensor, torch.Tensor]


def attention(arguments: Arguments) -> Pair:
    """Of prefill and decode of one request and of batches, over keys and values or a cache of both."""
    q = arguments["q"]
    cache: Any = next(arguments[name] for name in ("v", "paged_kv_cache", "kv_cache") if name in arguments)
    v: Any = cache if isinstance(cache, torch.Tensor) else cache[1]
    head_dim = 2 * v.shape[-1] if v.dtype == torch.uint8 else v.shape[-1]  # numbers of NVFP4 share a byte by two
    dtype = arguments.get("o_dtype") or (torch.bfloat16 if q.dtype in FP8 else q.dtype)
    return _attention(arguments, q, head_dim, dtype)


def xqa(arguments: Arguments) -> Pair:
    """Of `xqa_batch_decode_with_kv_cache`: a new out has an axis of query tokens where there are several."""
    query = arguments["query"]
    out, lse = _attention(arguments, query, query.shape[-1], query.dtype)
    q_len = arguments["q_len_per_req"]
    if arguments["out"] is None and arguments["q_cu_seq_lens"] is None and q_len is not None and q_len > 1:
        out = out.unflatten(0, (-1, q_len))
    return out, lse


def trtllm(arguments: Arguments) -> Pair:
    """Of `trtllm_batch_decode_with_kv_cache`."""
    query, dtype = arguments["query"], arguments["out_dtype"]
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return _attention(arguments, query, query.shape[-1], dtype or query.dtype)


def latent(arguments: Arguments) -> Pair:
    """Of `trtllm_batch_decode_with_kv_cache_mla`: out has query's axes, lse one axis for all tokens."""
    query = arguments["query"]
    out, lse = _attention(arguments, query, arguments["kv_lora_rank"], query.dtype)
    return out, lse.flatten(0, -2) if lse.dim() > 2 else lse


def latent_run(arguments: Arguments) -> Pair:
    """Of runs of latent attention, whose queries come in two parts."""
    q_nope = arguments["q_nope"]
    return _attention(arguments, q_nope, q_nope.shape[-1], arguments["o_dtype"])


def merged(arguments: Arguments) -> Pair:
    """Of `merge_state` and `merge_states`: states may have an axis of their own behind the first one."""
    v, s, *_ = arguments.values()
    return v.new_empty(v.shape[:1] + v.shape[-2:]), s.new_empty(s.shape[:1] + s.shape[-1:], dtype=torch.float32)


def nvfp4(arguments: Arguments) -> Pair:
    """Of `nvfp4_kv_quantize`: two numbers per byte, and a scale per 16 numbers."""
    rows, size = arguments["input"].shape
    new = arguments["input"].new_empty
    return new((rows, size // 2), dtype=torch.uint8), new((rows, size // 16), dtype=torch.uint8)


def dequantized(arguments: Arguments) -> torch.Tensor:
    """Of `nvfp4_kv_dequantize`."""
    packed = arguments["fp4_data"]
    result: torch.Tensor = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=arguments["output_dtype"])
    return result


def _attention(arguments: Arguments, q: torch.Tensor, head_dim: Any, dtype: torch.dtype) -> Pair:
    """Return out and lse for query rows `[..., num_qo_heads, head_dim]`; lse too where there is no `return_lse`."""
    rows = q.shape[:-1]
    out = q.new_empty(0 if arguments.get("out") is not None else (*rows, head_dim), dtype=dtype)
    if arguments.get("lse") is not None or not arguments.get("return_lse", True):
        return out, q.new_empty(0, dtype=torch.float32)
    by_heads = arguments.get("lse_layout") == "HN"
    return out, q.new_empty(tuple(reversed(rows)) if by_heads else rows, dtype=torch.float32)
