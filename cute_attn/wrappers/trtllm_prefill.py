"""FlashInfer's TRT-LLM prefill functions on the prefill kernels here: one call each, without a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from cute_attn.dispatch import select
from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.request import checks, operands, trtllm_options, unplanned
from cute_attn.request.batch_plan import PlanOptions
from cute_attn.request.batch_run import RunArguments
from cute_attn.request.caches import cache_views
from cute_attn.request.trtllm_options import FP4Tensor
from cute_attn.request.unplanned import Keys
from cute_attn.wrappers import planned_prefill
from cute_attn.wrappers.planned_prefill import Structure, repeated

PAGED_LAYOUTS = {"Q_PAGED_KV_NHD": "NHD", "Q_PAGED_KV_HND": "HND"}
INPUT_LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", *PAGED_LAYOUTS)
MASK_MODES = ("causal", "sliding_window", "chunked", "padding")
NVFP4_INSTEAD = "BatchPrefillWithPagedKVCacheWrapper.run(kv_cache_sf=) with scales in order"


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute prefill or append attention of a batch over a paged cache, without a plan by the caller.

    For query token i of a request with qo_len query tokens and kv_len keys, and key j, in the natural-log domain::

        z = bmm1_scale * q_i.k_j
        z = -inf                       where causal and j > i + kv_len - qo_len, and where the window hides j
        out_i = bmm2_scale * sum_j exp(z) v_j / (sum_j exp(z) + exp(sink))
        lse_i = log2(sum_j exp(z) + exp(sink))

    A token that sees no key has out 0 and lse -inf. No gradients are computed.

    Lengths are read on the host: on a GPU that is one copy and one synchronisation per call, and none if `seq_lens` and
    `cum_seq_lens_q` are on the CPU. The schedule of an earlier call with the same lengths and options is used again, so
    that the layers of a model share one; page numbers are read on the device in every call. Up to 16 schedules per
    stream, and the latest workspace, stay allocated. A call cannot be captured in a CUDA graph: capture `run` of
    `BatchPrefillWithPagedKVCacheWrapper`, or `trtllm_batch_decode_with_kv_cache` with `cum_seq_lens_q`.

    Parameters
    ----------
    query : `[num_tokens, num_qo_heads, head_dim]`, num_tokens >= cum_seq_lens_q[-1]. dtypes, strides and head
        dimensions: q of `BatchPrefillWithPagedKVCacheWrapper.run`.
    kv_cache : a pair of `[num_pages, num_kv_heads, page_size, head_dim]` ("HND") or `[num_pages, page_size,
        num_kv_heads, head_dim]` ("NHD"), or one tensor with an axis of 2 (keys, values), or 1 (both are the same),
        after the first; as for `BatchPrefillWithPagedKVCacheWrapper.run`.
    workspace_buffer : contiguous, any dtype, 16-byte aligned, on query's device: partial results where keys are split.
        128 MB are enough for every batch; with less, keys are split less. Two streams must not use it at once.
    block_tables : int32 `[batch_size, max_pages]` on query's device, page numbers of each request in order; with
        `uses_shared_paged_kv_idx=False` `[batch_size, 2, max_pages]`. Entries past a request's last page are not read.
        Page numbers are checked for CPU tensors, and on a GPU with `CUTE_ATTN_VALIDATE=1`.
    seq_lens : int32, uint32 or int64 `[batch_size]`, keys of each request in tokens, on query's device or the CPU.
    max_q_len, max_kv_len : int, upper bounds of the query tokens and of the keys of a request; checked.
    bmm1_scale, bmm2_scale : finite numbers, or floating-point tensors of one element, which the kernel reads.
        bmm1_scale must include 1 / sqrt(head_dim).
    batch_size : int, requests; checked.
    cum_seq_lens_q : int32, uint32 or int64 `[batch_size + 1]`, not decreasing: query tokens of request i are rows
        cum_seq_lens_q[i] to cum_seq_lens_q[i + 1]. On query's device or the CPU. Rows that belong to no request are 0
        in a new out, and not written in a given one.
    cum_seq_lens_kv : a tensor, not read: seq_lens says the same. (Engines pass sums of tokens, or of pages.)
    window_left : >= 0: token i sees no key before i + kv_len - qo_len - window_left. Negative (default): no window.
    out : written and returned: query's shape, of a dtype that a backend writes (16 bits, or float32). Default: new.
    out_dtype : dtype of out, or its name. Default: that of out, or query's (bfloat16 for fp8 query). "nvfp4" is
        refused, and so is an `FP4Tensor` as out.
    kv_layout : "HND" (default) or "NHD".
    sinks : floating-point `[num_qo_heads]`, or a list of one such tensor: natural-log domain, not scaled. Default:
        none.
    kv_cache_sf : NVFP4 caches are refused: FlashInfer interleaves their scales of v here.
    o_sf_scale, o_sf_vec_size, enable_pdl, skip_softmax_threshold_scale_factor, uses_shared_paged_kv_idx, return_lse,
        multi_ctas_kv_counter_buffer : as for `trtllm_batch_decode_with_kv_cache`.
    causal : default True. False: a token sees all keys of its request, or those from its window's start on.
    lse : written instead of a new tensor: contiguous float32 `[num_tokens, num_qo_heads]`.
    use_fp16_softmax, uses_spcompress : refused unless None or False.
    backend : "trtllm-gen" (default) or "auto": the best backend here; or "fa4", "fa3", "fa2", "reference" or
        "emulator".

    Returns
    -------
    The given out, or a new one of query's shape. With `return_lse` the pair of it and the **base-2** lse, float32
    `[num_tokens, num_qo_heads]`.

    Raises
    ------
    ArgumentError (a ValueError: shape, dtype, device or value, lengths beyond block_tables or a bound),
    ArgumentTypeError (a TypeError), LayoutError (a KeyError: `kv_layout`, `backend`), NotSupported (a
    NotImplementedError: what is refused above, capture in a CUDA graph, or what no backend takes).
    """
    repeatable = repeated("trtllm_batch_context_with_kv_cache", (query, kv_cache), locals(), ARRAYS[:2])
    if repeatable.outputs is not None:
        return repeatable.outputs if return_lse else repeatable.outputs[0]
    trtllm_options.refuse_nvfp4_output(out, out_dtype, o_sf_scale, o_sf_vec_size)
    trtllm_options.refuse_skipped_softmax(skip_softmax_threshold_scale_factor)
    checks.refuse_given(trtllm_options.EXACT, use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress)
    trtllm_options.check_counters(multi_ctas_kv_counter_buffer)
    if kv_cache_sf is not None:
        checks.refuse("kv_cache_sf (NVFP4 caches)", trtllm_options.INTERLEAVED, NVFP4_INSTEAD)
    checks.tensor("cum_seq_lens_kv", cum_seq_lens_kv)
    keys = Keys(*cache_views("kv_cache", kv_cache, kv_layout, may_be_one=True), block_tables)
    if not checks.boolean("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        keys = unplanned.joined(keys, seq_lens)
    backend = select.checked_name(backend, same=("trtllm-gen",))
    checks.boolean("causal", causal)
    checks.boolean("return_lse", return_lse)
    return _run(locals())


def trtllm_fmha_v2_prefill(
    qkv: torch.Tensor | tuple[Any, ...],
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float | None = 0,
    *,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute prefill attention of a batch over ragged or paged keys, without a plan by the caller.

    Formulas, when lengths are read, and capture in CUDA graphs: `trtllm_batch_context_with_kv_cache`. With a soft cap
    z = cap * tanh(z / cap); under ALiBi z = z + slope * (j - i), slopes of Press et al. 2022.

    Parameters
    ----------
    qkv : by `input_layout`::

            PACKED_QKV         [num_tokens, 3, num_heads, head_dim]
            CONTIGUOUS_Q_KV    (q [num_tokens, num_qo_heads, head_dim], kv [kv_tokens, 2, num_kv_heads, head_dim])
            SEPARATE_Q_K_V     (q, k [kv_tokens, num_kv_heads, head_dim], v [kv_tokens, num_kv_heads, head_dim_vo])
            Q_PAGED_KV_NHD     (q, cache [num_pages, 2, page_size, num_kv_heads, head_dim], or a pair (k, v))
            Q_PAGED_KV_HND     (q, cache [num_pages, 2, num_kv_heads, page_size, head_dim], or a pair (k, v))

    input_layout : one of these names.
    workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch_size, out_dtype, sinks : as for
        `trtllm_batch_context_with_kv_cache`.
    cum_seq_lens_q, cum_seq_lens_kv : int32, uint32 or int64 `[batch_size + 1]`, on query's device or the CPU: rows of
        the query tokens and, unless keys are paged, of the keys of each request. With pages cum_seq_lens_kv is not
        read.
    block_tables : for paged layouts int32 `[batch_size, max_pages]`; or, with a pair (k, v), `[batch_size, 2,
        max_pages]` as FlashInfer needs it: pages of keys and of values, both counted from the start of k in one
        allocation. The values of all requests must then be the same number of pages away from their keys, which is
        read. Must be None for other layouts.
    out : written and returned: `[num_tokens, num_qo_heads, head_dim_vo]`. Default: new.
    pos_encoding_mode : None (default), "NONE" or "ALIBI", in any case.
    logits_soft_cap_scale : soft cap of the logits; None (default), 0 or a negative number: none.
    mask_mode : "causal" (default), "sliding_window" or "chunked" (both causal too), or "padding" (no causal mask), in
        any case. "custom" is refused.
    window_left : >= 0: token i sees no key before i + kv_len - qo_len - window_left. Negative (default): no window. Not
        with "padding" or chunks.
    chunked_attention_size : c > 0, any number: chunks of c keys; a token at position p = i + kv_len - qo_len sees no
        key before p // c * c. 0 (default), negative or None: no chunks. Required with mask_mode "chunked"; not with
        "padding". Runs as multi-item scoring: what a backend says of it is true of chunks.
    save_softmax_stats : return also float32 `[num_tokens, num_qo_heads, 2]`, a maximum m and a sum s of each row. m is
        in units of q.k / sqrt(head_dim), as in FlashInfer on Hopper: the row's natural-log lse is m * bmm1_scale *
        sqrt(head_dim) + ln(s), with a soft cap m * sqrt(head_dim) + ln(s). Here s is about 1, and 0 for a row that sees
        no key; m stands for all of the lse. Where bmm1_scale is 0, m is 0.
    skip_softmax_threshold_scale_factor : refused unless 0 (default) or None.
    backend : "auto" (default), "fa4", "fa3", "fa2", "reference" or "emulator".

    Returns
    -------
    The given out, or a new one; with `save_softmax_stats` the pair of it and the statistics.

    Raises
    ------
    The errors of `trtllm_batch_context_with_kv_cache`; LayoutError also for an unknown `input_layout`, `mask_mode` or
    `pos_encoding_mode`; ArgumentError also for cum_seq_lens_kv that differ from seq_lens, and for a window, chunks or
    ALiBi with "padding".
    """
    read = ARRAYS[:3] if block_tables is None else ARRAYS[:2]
    repeatable = repeated("trtllm_fmha_v2_prefill", qkv, locals(), read)
    if repeatable.outputs is not None:
        out, lse = repeatable.outputs
        return (out, _statistics(lse, qkv[0], bmm1_scale, logits_soft_cap_scale)) if save_softmax_stats else out
    trtllm_options.refuse_skipped_softmax(skip_softmax_threshold_scale_factor)
    trtllm_options.refuse_nvfp4_output(out, out_dtype, None, None)
    causal, chunk = _mask(mask_mode, window_left, chunked_attention_size)
    checks.choice("input_layout", input_layout, INPUT_LAYOUTS)
    query, keys = _operands(qkv, input_layout)
    if input_layout in PAGED_LAYOUTS:
        keys = _pages(keys._replace(tables=block_tables), seq_lens)
    elif block_tables is not None:
        accepted = f"None with input_layout={input_layout!r}, which has no pages"
        raise checks.wrong(f"block_tables must be {accepted}", block_tables)
    backend, pos_encoding_mode = select.checked_name(backend), _encoding(pos_encoding_mode, causal)
    logits_soft_cap = checks.real("logits_soft_cap_scale", logits_soft_cap_scale, 0.0)
    result = _run(locals(), return_lse=checks.boolean("save_softmax_stats", save_softmax_stats))
    if not save_softmax_stats:
        return result
    return result[0], _statistics(result[1], query, bmm1_scale, logits_soft_cap)


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: tuple[torch.Tensor | None, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, ...] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None,
    kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute prefill attention of a batch over ragged keys, without a plan: how engines prefill models with MLA.

    Head dimensions (192, 128) are DeepSeek's; every pair that a backend supports is accepted. Formulas and plans:
    `trtllm_batch_context_with_kv_cache`. Where `q_seq_lens_cpu` and `kv_seq_lens_cpu` are given, nothing is read from
    the GPU, and the call does not synchronise.

    Parameters
    ----------
    query : `[num_tokens, num_qo_heads, head_dim_qk]`, num_tokens >= cum_seq_lens_q[-1]. dtypes, strides and head
        dimensions: q of `BatchPrefillWithRaggedKVCacheWrapper.run`.
    key, value : `[kv_tokens, num_kv_heads, head_dim_qk]` and `[kv_tokens, num_kv_heads, head_dim_vo]`: k and v of it.
    workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch_size, window_left, enable_pdl,
        return_lse, lse, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress : as for
        `trtllm_batch_context_with_kv_cache`, of which some have no defaults here.
    o_sf_scale : a number, not used: it scales NVFP4 output, which this function does not write.
    cum_seq_lens_q, cum_seq_lens_kv : int32, uint32 or int64 `[batch_size + 1]`, on query's device or the CPU: rows of
        the query tokens and of the keys of each request.
    is_causal : False: a token sees all keys of its request, or those from its window's start on.
    attention_sinks : floating-point `[num_qo_heads]`, natural-log domain, not scaled. Default: none.
    out : written and returned: `[num_tokens, num_qo_heads, head_dim_vo]`, 16 bits, or float32. Default: new, of query's
        dtype (bfloat16 for fp8 query).
    sage_attn_sfs, num_elts_per_sage_attn_blk : arguments of SageAttention; refused unless None and 0 throughout.
    backend : "trtllm-gen" (default), "cute-dsl" or "auto": the best backend here; or "fa4", "fa3", "fa2", "reference"
        or "emulator".
    q_seq_lens_cpu, kv_seq_lens_cpu : int32 or int64 `[batch_size]` on the CPU: query tokens and keys of each request,
        as cum_seq_lens_q, seq_lens and cum_seq_lens_kv have them, which are then not read. Both, or neither (default).
    skip_all_rows_active_check : True or False, not used: requests may have no query tokens, or no keys, in any case.

    Returns
    -------
    The given out, or a new one; with `return_lse` the pair of it and the **base-2** lse, float32 `[num_tokens,
    num_qo_heads]`. Tokens of a request without keys have out 0 and lse -inf (with sinks: the sink's).

    Raises
    ------
    The errors of `trtllm_batch_context_with_kv_cache`; ArgumentError also for cum_seq_lens_kv that differ from
    seq_lens, and for one of q_seq_lens_cpu and kv_seq_lens_cpu alone.
    """
    on_host = not q_seq_lens_cpu is kv_seq_lens_cpu is None
    read = planned_prefill.LENGTHS[3:] if on_host else ARRAYS[:3]
    repeatable = repeated("trtllm_ragged_attention_deepseek", (query, key, value), locals(), read)
    if repeatable.outputs is not None:
        return repeatable.outputs if return_lse else repeatable.outputs[0]
    trtllm_options.refuse_skipped_softmax(skip_softmax_threshold_scale_factor)
    checks.refuse_given(trtllm_options.EXACT, use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress)
    trtllm_options.refuse_nvfp4_output(out, None, None, None)
    trtllm_options.refuse_sage_attention(sage_attn_sfs, num_elts_per_sage_attn_blk)
    checks.real("o_sf_scale", o_sf_scale)
    checks.boolean("skip_all_rows_active_check", skip_all_rows_active_check)
    names = RAGGED_NAMES
    if on_host:
        names, repeatable = RAGGED_NAMES | HOST_NAMES, repeatable._replace(lengths=None)
        cum_seq_lens_q, seq_lens, cum_seq_lens_kv = unplanned.from_host(q_seq_lens_cpu, kv_seq_lens_cpu)
    backend = select.checked_name(backend, same=("trtllm-gen", "cute-dsl"))
    causal, keys = checks.boolean("is_causal", is_causal), _ragged({"key": key, "value": value})
    checks.boolean("return_lse", return_lse)
    return _run(locals(), sinks=attention_sinks)


# ---- arguments


# Arguments that some of these functions lack, under the names of `trtllm_batch_context_with_kv_cache`. `chunk` > 0: a
# token sees no key before the multiple of it at or before its own position. `names`: of arguments that a function calls
# otherwise.
NOT_GIVEN: dict[str, Any] = {
    **dict.fromkeys(("block_tables", "out_dtype", "lse", "enable_pdl")),
    "logits_soft_cap": 0.0,
    "pos_encoding_mode": "NONE",
    "chunk": 0,
    "return_lse": False,
    "names": {},
}
ARRAYS = ("cum_seq_lens_q", "seq_lens", "cum_seq_lens_kv", "block_tables")
SIZES = ("batch_size", "max_q_len", "max_kv_len")
WRAPPER_NAMES = {
    "q": "query",
    "q_data_type": "query's dtype",
    "kv_data_type": "the dtype of k and v",
    "paged_kv_cache": "the cache",
    "o_data_type": "out_dtype",
    "q_scale": "bmm1_scale",
    "v_scale": "bmm2_scale",
    "logits_soft_cap": "logits_soft_cap_scale",
}


# Of `trtllm_ragged_attention_deepseek`, and where it is given lengths on the host.
RAGGED_NAMES = {"k": "key", "v": "value", "k and v": "key and value", "sinks": "attention_sinks"}
HOST_NAMES = {
    "cum_seq_lens_q": "the sums of q_seq_lens_cpu",
    "seq_lens": "kv_seq_lens_cpu",
    "cum_seq_lens_kv": "the sums of kv_seq_lens_cpu",
}


def _pages(keys: Keys, seq_lens: Any) -> Keys:
    """Return k, v and the table of both, from a table that may count the pages of values from the start of k."""
    k, v, block_tables = keys
    if not isinstance(block_tables, torch.Tensor) or block_tables.dim() != 3:
        return keys
    page_bytes = k.stride(0) * k.element_size()
    origin, rest = divmod(v.data_ptr() - k.data_ptr(), page_bytes) if page_bytes else (0, 1)
    if rest or v.stride(0) != k.stride(0):
        raise ArgumentError(
            "block_tables [batch_size, 2, max_pages] counts pages from the start of k: k and v must be whole pages "
            "apart in one allocation; pass block_tables [batch_size, max_pages] for caches of their own"
        )
    return unplanned.joined(keys, seq_lens, origin)


def _operands(qkv: Any, input_layout: str) -> tuple[Any, Keys]:
    """Return query, keys and values of an input layout."""
    if input_layout == "PACKED_QKV":
        packed = checks.tensor("qkv", qkv)
        checks.shape("qkv", packed, (None, 3, None, None), "[num_tokens, 3, heads, head_dim]")
        query, k, v = packed.unbind(1)
        return query, Keys(k, v)
    count = 3 if input_layout == "SEPARATE_Q_K_V" else 2
    if not isinstance(qkv, tuple | list) or len(qkv) != count:
        raise checks.wrong(f"qkv must be a tuple of {count} for {input_layout}", qkv, ArgumentTypeError)
    if input_layout in PAGED_LAYOUTS:
        return qkv[0], Keys(*cache_views("the cache of qkv", qkv[1], PAGED_LAYOUTS[input_layout], may_be_one=True))
    if count == 2:
        kv = checks.tensor("kv of qkv", qkv[1])
        checks.shape("kv of qkv", kv, (None, 2, None, None), "[kv_tokens, 2, heads, head_dim]")
        return qkv[0], Keys(*kv.unbind(1))
    return qkv[0], _ragged({"k of qkv": qkv[1], "v of qkv": qkv[2]})


def _ragged(keys: dict[str, Any]) -> Keys:
    """Return keys and values that are in rows."""
    for name, x in keys.items():
        checks.shape(name, checks.tensor(name, x), (None, None, None), "[kv_tokens, heads, head_dim]")
    return Keys(*keys.values())


def _mask(mask_mode: Any, window_left: Any, chunked_attention_size: Any) -> tuple[bool, int]:
    """Return whether a mask mode is causal, and the size of its chunks, 0 for none; refuse what is no band of keys."""
    mode = mask_mode.lower() if isinstance(mask_mode, str) else mask_mode
    if mode == "custom":
        instead = "custom_mask of BatchPrefillWithPagedKVCacheWrapper.plan"
        checks.refuse(f"mask_mode={mask_mode!r}", "the function has no argument for a mask", instead)
    checks.choice("mask_mode", mode, MASK_MODES)
    size = chunked_attention_size
    chunk = 0 if size is None else max(0, checks.integer("chunked_attention_size", size))
    if mode == "chunked" and not chunk:
        raise ArgumentError(f"chunked_attention_size must be > 0 with mask_mode='chunked', got {size}")
    if mode == "padding" and chunk:
        raise ArgumentError(f"chunked_attention_size must be 0 with mask_mode='padding', got {size}")
    if (mode == "padding" or chunk) and checks.whole("window_left", window_left) >= 0:
        other = f"chunked_attention_size={size}" if chunk else "mask_mode='padding'"
        raise ArgumentError(f"window_left must be negative with {other}, got {window_left}")
    return mode != "padding", chunk


def _encoding(pos_encoding_mode: Any, causal: bool) -> str:
    mode = "NONE" if pos_encoding_mode is None else pos_encoding_mode
    mode = checks.choice("pos_encoding_mode", mode.upper() if isinstance(mode, str) else mode, ("NONE", "ALIBI"))
    if mode == "ALIBI" and not causal:
        raise ArgumentError("pos_encoding_mode 'ALIBI' with mask_mode='padding' is causal in FlashInfer: pass 'causal'")
    return mode


# ---- run


def _run(arguments: Mapping[str, Any], **others: Any) -> Any:
    """Check and run a call with these arguments by name, `others` first, and `keys`, whose pages are views of layout
    "NHD". Errors have the caller's names.
    """
    call = SimpleNamespace(**{**NOT_GIVEN, **arguments, **others})
    with checks.renamed({**WRAPPER_NAMES, **call.names}):
        return _checked(call)


def _checked(call: SimpleNamespace) -> Any:
    query, keys = call.query, call.keys
    given, sizes = ({name: getattr(call, name) for name in names} for names in (ARRAYS, SIZES))
    checks.shape("query", checks.tensor("query", query), (None, None, None), "[num_tokens, num_qo_heads, head_dim]")
    checks.apart((("out", call.out), ("lse", call.lse)), given.items())
    if keys.paged:
        tables = "block_tables", keys.tables, (torch.int32,), (None, None), "[batch_size, max_pages]", query.device
        keys = keys._replace(tables=checks.operand(*tables).contiguous())
    read = {name: given[name] for name in (ARRAYS[:2] if keys.paged else ARRAYS[:3])}
    arrays = unplanned.lengths(read, sizes, query, keys.k, call.repeatable.lengths)
    dtype = trtllm_options.output_dtype(call.out, call.out_dtype)
    structure = Structure.of(
        query,
        keys,
        call.backend,
        call.chunk,
        o_data_type=dtype or (query.dtype if query.itemsize > 1 else torch.bfloat16),
        pos_encoding_mode=call.pos_encoding_mode,
        causal=call.causal,
        window_left=max(-1, checks.whole("window_left", call.window_left)),
        logits_soft_cap=call.logits_soft_cap,
    )
    workspace = checks.tensor("workspace_buffer", call.workspace_buffer)
    checks.device("workspace_buffer", workspace, query.device)
    operands.check_workspace("workspace_buffer", workspace)
    out, lse = _outputs(call, rows := int(arrays[0][-1]), structure.options)
    for name in ("bmm1_scale", "bmm2_scale"):  # None stands for 1 in runs, which check all else
        if getattr(call, name) is None:
            raise ArgumentTypeError(f"{name} must be a number or a floating-point tensor of one element, got None")
    run = RunArguments(
        query[:rows],
        (keys.k, keys.v),
        q_scale=call.bmm1_scale,
        v_scale=call.bmm2_scale,
        out=None if out is None else out[:rows],
        lse=None if lse is None else checks.tensor("lse", lse)[:rows],
        return_lse=call.return_lse,
        enable_pdl=call.enable_pdl,
        sinks=trtllm_options.one_sink(call.sinks),
    )
    whole = rows == query.shape[0] and keys.tables is call.block_tables and call.repeatable.key is not None
    result = planned_prefill.run(workspace, structure, run, keys, arrays, call.repeatable[:2] if whole else None)
    made, made_lse = result if call.return_lse else (result, None)
    out = made if out is None else out
    return (out, made_lse if lse is None else lse) if call.return_lse else out


def _outputs(call: SimpleNamespace, rows: int, options: PlanOptions) -> tuple[Any, Any]:
    """Return out and lse with all rows of query where some belong to no request: these are 0 (lse: -inf) if new."""
    query, out, lse = call.query, call.out, call.lse
    if rows == query.shape[0]:
        return out, lse
    element, given = (options.head_dim_vo, options.o_data_type), (out, lse, call.return_lse)
    out, lse = operands.outputs(query, given, element, tuple(query.shape[:2]), "num_tokens, num_qo_heads")
    if call.out is None:
        out.zero_()
    if call.lse is None and lse is not None:
        lse.fill_(-torch.inf)
    return out, lse


def _statistics(lse: Any, query: torch.Tensor, bmm1_scale: Any, soft_cap: float | None) -> torch.Tensor:
    """Return (maximum, sum) of every row from its base-2 lse: ln(sum) + maximum * unit is the natural-log lse."""
    natural = lse * 0.6931471805599453
    unit = math.sqrt(query.shape[2]) * (1.0 if soft_cap is not None and soft_cap > 0 else bmm1_scale)
    if isinstance(unit, torch.Tensor):
        unit = unit.reshape(())  # one element of any shape, perhaps on the CPU
    maximum = natural / unit if isinstance(unit, torch.Tensor) or unit else torch.zeros_like(natural)
    maximum = torch.where(maximum.isfinite(), maximum, 0.0)  # a row without keys, or a unit of 0
    return torch.stack((maximum, (natural - maximum * unit).exp()), -1)
