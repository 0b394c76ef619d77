"""Multi-head latent attention (MLA) with absorbed queries over paged latent caches (FlashInfer's `flashinfer.mla`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.dispatch import select
from cute_attn.dispatch.mla import BACKENDS
from cute_attn.ops import declare, fakes, trace
from cute_attn.request import checks, trtllm_options
from cute_attn.request.mla import (
    NARROW,
    OF_CACHE,
    OF_QUERY,
    OF_TABLE,
    MlaCall,
    MlaLengths,
    split_rows,
)
from cute_attn.request.operands import flat_tokens
from cute_attn.wrappers import mla as calls
from cute_attn.wrappers.mla import BatchMLAPagedAttentionWrapper
from cute_attn.wrappers.mla_plan import MLAPlanMetadata, checked_dims

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]

SAME = ("auto", "xqa", "trtllm-gen")  # FlashInfer's dense implementations of this function; one here stands for all
QUERY_AXES = "[batch_size, q_len, num_heads, columns], or [num_tokens, num_heads, columns] with cum_seq_lens_q"
CACHE_AXES = "[num_pages, page_size, columns] or [num_pages, 1, page_size, columns]"
SPARSE = ("keys are all tokens of a request", "sparse_mla_top_k=0 and a page table")
NAMES = OF_QUERY | OF_CACHE | OF_TABLE
LSE_BASES = {None: "log2", "base2": "log2", "basee": "ln"}


@declare.operator("trtllm_batch_decode_mla", fakes.latent)
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute latent attention of the newest token or tokens of every request over its paged latent cache.

    Row c_j of the cache has 576 columns (512 with qk_rope_head_dim=0): keys. The first 512 are the values too, and all
    heads share them. Queries are absorbed: the projection from heads to the latent space is multiplied into them. Row r
    of a request with q_len query tokens has position seq_len - q_len + r and sees the keys up to it. For key j and one
    head, in the natural-log domain::

        z = bmm1_scale * q.c_j
        z = -inf                       where row r does not see key j
        out = bmm2_scale * sum_j exp(z) c_j[:512] / (sum_j exp(z) + exp(sink))
        lse = log2(sum_j exp(z) + exp(sink))

    A row that sees no key has out 0 and lse -inf (with a sink: lse = sink * log2(e)). Lengths and page tables are read
    on the device. Values of both are checked for CPU tensors, and on a GPU with `CUTE_ATTN_VALIDATE=1` in the
    environment. No gradients are computed.

    Parameters
    ----------
    query : `[batch_size, q_len, num_heads, 576]`, or with cum_seq_lens_q `[num_tokens, num_heads, 576]`; float16 or
        bfloat16 (float8_e4m3fn is refused). Any strides; rows that are not 16-byte aligned on a GPU cost a copy.
    kv_cache : `[num_pages, page_size, 576]` or `[num_pages, 1, page_size, 576]` of query's dtype or float8_e4m3fn,
        whose scale is a factor of both scales below; any page size, any strides with 1 on the last axis, rows 16-byte
        aligned on a GPU.
    workspace_buffer : of any dtype, contiguous, on query's device, for partial results; it need not be zero. Where it
        is too small a launch uses memory of its own.
    qk_nope_head_dim : int >= 1, the head dimension before absorption; it changes nothing.
    kv_lora_rank, qk_rope_head_dim : 512 and 64, or 512 and 0 for models without rotated columns; others are refused.
    seq_lens : int32 `[batch_size]`, keys of each request in tokens, those of the query tokens included.
    block_tables, max_seq_len, skip_softmax_threshold_scale_factor, enable_pdl, return_lse,
        multi_ctas_kv_counter_buffer : as for `trtllm_batch_decode_with_kv_cache`.
    out : written and returned: query's shape with 512 on the last axis, of query's dtype, rows 16-byte aligned on a
        GPU. Default: a new tensor.
    bmm1_scale, bmm2_scale : finite numbers, or floating-point tensors of one element, which a GPU reads without
        synchronisation. Default 1. bmm1_scale must include 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim).
    sinks : floating-point `[num_heads]`, or a list of one such tensor; natural-log domain, not scaled. Default: none.
    backend : "auto" (default), "xqa" or "trtllm-gen", which mean the same here, or "reference".
    is_var_seq : bool, changes nothing: lengths are read in any case.
    uses_shared_paged_kv_idx : False is refused: keys and values are the same rows.
    lse : written instead of a new tensor: contiguous float32 `[num_tokens, num_heads]`, or `[batch_size, q_len,
        num_heads]`. Written also without `return_lse`.
    cute_dsl_impl, kv_scale_format : "auto"; others are refused: they belong to other kernels.
    cum_seq_lens_q : int32 `[batch_size + 1]`, from 0, not decreasing: query tokens of request i are rows
        cum_seq_lens_q[i] to cum_seq_lens_q[i + 1].
    max_q_len : int >= 1, the most query tokens of a request, with cum_seq_lens_q. Default: read from it, which
        synchronises on a GPU.
    sparse_mla_top_k, sparse_mla_top_k_lens, enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global,
        use_fp16_softmax : refused unless they have their defaults (use_fp16_softmax: unless None or False).
    return_lse_base : "base2" (default, and None) or "basee": the logarithm of lse.

    Returns
    -------
    The given out, or a new one: query's shape with 512 on the last axis. With `return_lse` the pair of it and lse,
    the given one or float32 `[num_tokens, num_heads]`.

    Raises
    ------
    ArgumentError (a ValueError: shape, dtype, device or value), ArgumentTypeError (a TypeError), LayoutError (a
    KeyError: `backend`, `return_lse_base`), NotSupported (a NotImplementedError: all that is refused above).

    Examples
    --------
    >>> query = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
    >>> cache = torch.randn(5, 32, 576, dtype=torch.bfloat16)
    >>> tables = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    >>> lengths = torch.tensor([40, 7], dtype=torch.int32)
    >>> scratch = torch.empty(1 << 20, dtype=torch.uint8)
    >>> found = trtllm_batch_decode_with_kv_cache_mla(
    ...     query, cache, scratch, 128, 512, 64, tables, lengths, 64, bmm1_scale=192**-0.5
    ... )
    >>> found.shape
    torch.Size([2, 1, 16, 512])
    """
    if is_dynamo_compiling():
        return trace.operator("trtllm_batch_decode_mla")(locals())
    if isinstance(sinks, list | tuple):
        sinks = trtllm_options.one_sink(sinks)
    if type(max_seq_len) is not int or not 0 <= max_seq_len <= checks.LARGEST_INT:
        checks.at_least("max_seq_len", max_seq_len, 0)
    call = MlaCall(
        query, None, kv_cache, None, None, out, lse, workspace_buffer,
        (block_tables, seq_lens, cum_seq_lens_q, None), bmm1_scale, bmm2_scale, sinks, True, return_lse, enable_pdl,
    )  # fmt: skip
    others = (
        qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, sparse_mla_top_k, skip_softmax_threshold_scale_factor,
        is_var_seq, uses_shared_paged_kv_idx, max_q_len, multi_ctas_kv_counter_buffer, sparse_mla_top_k_lens,
        enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global, use_fp16_softmax,
    )  # fmt: skip
    texts = "whole", backend, cute_dsl_impl, kv_scale_format, return_lse_base
    repeatable, found = calls.repeated(call, others, texts)
    if found is not None:
        return found if return_lse else found[0]
    if checks.integer("sparse_mla_top_k", sparse_mla_top_k) != 0 or sparse_mla_top_k_lens is not None:
        checks.refuse("sparse MLA (sparse_mla_top_k, sparse_mla_top_k_lens)", *SPARSE)
    if not checks.boolean("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        checks.refuse("uses_shared_paged_kv_idx=False", "values are columns of the keys", "one page table")
    one_token = "one query token"
    trtllm_options.refuse_context_parallelism(cp_world, cp_rank, causal_seqlens_kv_global, one_token, enable_dcp)
    trtllm_options.refuse_skipped_softmax(skip_softmax_threshold_scale_factor)
    checks.refuse_given("softmax is in fp32", use_fp16_softmax=use_fp16_softmax)
    trtllm_options.check_counters(multi_ctas_kv_counter_buffer)
    for name, value in (("cute_dsl_impl", cute_dsl_impl), ("kv_scale_format", kv_scale_format)):
        if value != "auto":
            checks.refuse(f"{name}={value!r}", "it chooses among other kernels", f'{name}="auto"')
    checks.at_least("qk_nope_head_dim", qk_nope_head_dim, 1)
    _, rope = checked_dims(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
    checks.boolean("is_var_seq", is_var_seq)
    backend = select.checked_name(backend, BACKENDS, SAME)
    base = checks.choice("return_lse_base", return_lse_base or "base2", ("base2", "basee"))
    call = _in_parts(call, cum_seq_lens_q, rope)._replace(lse_base=LSE_BASES[base])
    if cum_seq_lens_q is not None and not max_q_len:  # what the bounds say, which every call reads
        repeatable = {}, None, repeatable[2]
    with checks.renamed(NAMES):
        lengths = MlaLengths.in_table(query, block_tables, seq_lens, cum_seq_lens_q, max_q_len)
        found = calls.run(call, lengths, backend, repeatable)
    return found if return_lse else found[0]


def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Compute latent attention of the newest tokens of every request: `trtllm_batch_decode_with_kv_cache_mla` with
    these arguments alone, on any GPU that has its kernels.

    Parameters
    ----------
    query : `[batch_size, q_len, num_heads, 576]`, as there. FlashInfer's has q_len 1.
    out : written and returned: query's shape with 512 on the last axis; with q_len 1 also `[batch_size, num_heads,
        512]`, the shape that FlashInfer names. Default: a new tensor.
    kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
        bmm1_scale, bmm2_scale, sinks, enable_pdl : as there.

    Returns
    -------
    The given out, or a new one: query's shape with 512 on the last axis, of query's dtype.

    Raises
    ------
    ArgumentError, ArgumentTypeError, NotSupported, as there.
    """
    whole = out
    if isinstance(out, torch.Tensor) and isinstance(query, torch.Tensor) and out.dim() == query.dim() - 1:
        whole = out.unsqueeze(1)
    found = trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, out=whole, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, sinks=sinks, enable_pdl=enable_pdl,
    )  # fmt: skip
    assert isinstance(found, torch.Tensor)
    return found if out is None else out


def _in_parts(call: MlaCall, bounds: Any, rope: int) -> MlaCall:
    """Return the call with queries and cache in parts, and all query tokens on one axis."""
    query, cache = call.q_nope, call.ckv_cache
    q_nope, q_pe = split_rows("query", query, (4,) if bounds is None else (3,), QUERY_AXES, rope)
    if query.dtype == NARROW:
        checks.refuse("query of float8_e4m3fn", "products have 16 bits", "query.to(torch.bfloat16)")
    if checks.tensor("kv_cache", cache).dim() == 4 and cache.shape[1] == 1:
        cache = cache[:, 0]
    of_cache = split_rows("kv_cache", cache, (3,), CACHE_AXES, rope)
    out, lse = _flat("out", call.out, query.shape), _flat("lse", call.lse, query.shape)
    return call.in_parts(q_nope.flatten(0, -3), q_pe.flatten(0, -3), *of_cache)._replace(out=out, lse=lse)


def _flat(name: str, buffer: Any, shape: torch.Size) -> Any:
    """Return a buffer for results with its tokens on one axis, as a view."""
    if not isinstance(buffer, torch.Tensor) or len(shape) == 3 or buffer.shape[:2] != shape[:2]:
        return buffer
    return buffer if name == "lse" and buffer.dim() == 2 else flat_tokens(name, buffer, (-1, *buffer.shape[2:]))
