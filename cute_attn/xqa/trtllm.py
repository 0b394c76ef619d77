"""`trtllm_batch_decode_with_kv_cache`: XQA decode under the name and with the keywords that serving engines use."""

from __future__ import annotations

import math
from operator import is_
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.ops import declare, fakes, trace
from cute_attn.request import checks, trtllm_options, unplanned
from cute_attn.request.caches import cache_views
from cute_attn.request.decode import Form
from cute_attn.request.trtllm_options import FP4Tensor
from cute_attn.xqa.decode import Cache, run

SAME = ("auto", "xqa", "trtllm-gen")  # FlashInfer's implementations of this function; one here stands for both
USUAL = (*(None,) * 9, False, 1, 0)  # what engines pass for arguments that are only checked


@declare.operator("trtllm_batch_decode", fakes.trtllm)
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Cache | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: Any = None,
    *,
    lse_layout: str = "NH",
    uniform_q_len: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute what `xqa_batch_decode_with_kv_cache` computes, under the name that serving engines call.

    Formulas, shapes, dtypes, units and what is checked when are in its docstring; the differences are below.

    Parameters
    ----------
    query, kv_cache, seq_lens, max_seq_len, bmm2_scale, window_left, enable_pdl, q_len_per_req, o_scale, mask,
        return_lse : arguments of `xqa_batch_decode_with_kv_cache`, with the same defaults.
    workspace_buffer : as there, but all of it has partial results and need not be zero: semaphores are always the
        launch's own.
    block_tables : int32 `[batch_size, max_pages]`; with `uses_shared_paged_kv_idx=False` `[batch_size, 2, max_pages]`.
    bmm1_scale : as there. `bmm1_scale_log2` replaces it.
    out : written and returned, as there. Default: a new tensor of query's shape, also for several query tokens per
        request. An `FP4Tensor` is refused.
    out_dtype : dtype of a new out, or its name: float16, bfloat16 or float8_e4m3fn; a given out must have it. Default:
        query's. "nvfp4" is refused.
    sinks : as there, or a list of one such tensor. Default: none.
    kv_layout : "HND" (default) or "NHD", of kv_cache and kv_cache_sf.
    backend : "auto" (default), "xqa" or "trtllm-gen", which mean the same here: XQA on a GPU, the reference on the CPU;
        or "reference" or "emulator".
    max_q_len, cum_seq_lens_q : q_len_per_req and q_cu_seq_lens of `xqa_batch_decode_with_kv_cache`, for ragged queries:
        an int, and int32 or uint32 `[batch_size + 1]`. Given together; max_q_len replaces q_len_per_req.
    skip_softmax_threshold_scale_factor : refused unless None (default) or 0.
    kv_cache_sf : as there. With `backend="trtllm-gen"` refused: FlashInfer interleaves its scales of v there.
    uses_shared_paged_kv_idx : True (default): keys and values are at the same pages. False: `block_tables[:, 0]` has
        the pages of keys, `block_tables[:, 1]` those of values. The values of all requests must be the same number of
        pages away from their keys (the same pages, or two parts of one pool); on a GPU this is read, with a
        synchronisation, unless both are the same memory (`tables[:, None].expand(-1, 2, -1)`), and cannot be captured
        otherwise.
    lse : written instead of a new tensor: contiguous float32 of the shape that lse_layout says. Written also without
        `return_lse`.
    bmm1_scale_log2 : floating-point tensor of one element, bmm1_scale times log2(e). Read by the kernel.
    multi_ctas_kv_counter_buffer : a tensor, not used and not written: semaphores are the launch's own.
    enable_block_sparse_attention : True is refused: a page table per kv head.
    o_sf_scale, o_sf_vec_size, cp_world, cp_rank, causal_seqlens_kv_global, request_order, request_order_plan : refused
        unless they have their defaults, 1, 0 and None. The first two belong to NVFP4 output.
    bf16q_fp8kv_transform_mode : "k_only", "separate_kv" or None (default): a hint. An fp8 cache under a 16-bit query is
        converted in registers in either case.
    lse_layout : "NH" (default): lse is `[num_tokens, num_qo_heads]`. "HN": `[num_qo_heads, num_tokens]`, a copy.
    uniform_q_len : None (default), or q_len_per_req again.

    Returns
    -------
    The given out, or a new one: `[num_tokens, num_qo_heads, head_dim]`. With `return_lse` the pair of it and the
    **base-2** lse, float32 of the shape that lse_layout says.

    Raises
    ------
    The errors of `xqa_batch_decode_with_kv_cache`; ArgumentError also for one of max_q_len and cum_seq_lens_q without
    the other, an out whose dtype is not out_dtype, and a list of several sinks; ArgumentTypeError for an out_dtype that
    is no dtype; LayoutError for an unknown `backend`; NotSupported for everything that is refused above, and for
    FlashInfer's other backends.
    """
    if is_dynamo_compiling():
        return trace.operator("trtllm_batch_decode")(locals())
    try:
        rare = (
            out_dtype, o_sf_scale, o_sf_vec_size, skip_softmax_threshold_scale_factor, bf16q_fp8kv_transform_mode,
            multi_ctas_kv_counter_buffer, request_order, request_order_plan, causal_seqlens_kv_global,
            enable_block_sparse_attention, cp_world, cp_rank,
        )  # fmt: skip
        usual = all(map(is_, rare, USUAL)) and not isinstance(out, FP4Tensor)
        dtype = None if usual else _check_rare(out, rare)
        if kv_cache_sf is not None:
            _check_block_scales(backend, uses_shared_paged_kv_idx)
        if uses_shared_paged_kv_idx is not True and not checks.boolean(
            "uses_shared_paged_kv_idx", uses_shared_paged_kv_idx
        ):
            k, v = cache_views("kv_cache", kv_cache, kv_layout, may_be_one=True)
            k, v, block_tables = unplanned.joined(unplanned.Keys(k, v, block_tables), seq_lens)
            kv_cache, kv_layout = (k, v), "NHD"
        scale, factor = bmm1_scale, 1.0
        if bmm1_scale_log2 is not None:
            scale, factor = bmm1_scale_log2, math.log(2.0)
            if not isinstance(scale, torch.Tensor) or scale.numel() != 1:
                accepted = "bmm1_scale_log2 must be a floating-point tensor of one element"
                raise checks.wrong(accepted, scale, ArgumentTypeError)
        if isinstance(sinks, list | tuple):
            sinks = trtllm_options.one_sink(sinks)
        return run(
            query, kv_cache, workspace_buffer, block_tables, seq_lens, cum_seq_lens_q, mask, sinks, scale, bmm2_scale,
            kv_cache_sf, out, lse, max_seq_len, window_left, enable_pdl,
            _q_len(q_len_per_req, max_q_len, cum_seq_lens_q, uniform_q_len), o_scale, return_lse, kv_layout,
            backend, Form(None, False, dtype, lse_layout, factor, (), SAME),
        )  # fmt: skip
    except (ArgumentError, ArgumentTypeError) as error:
        checks.rename(error, _names(out, max_q_len, bmm1_scale_log2))
        raise


def _names(out: Any, max_q_len: Any, bmm1_scale_log2: Any) -> dict[str, str]:
    """Return names that shared checks have for arguments of a call, and the call's own."""
    found = {"q_cu_seq_lens": "cum_seq_lens_q"}
    if max_q_len is not None:
        found["q_len_per_req"] = "max_q_len"
    if bmm1_scale_log2 is not None:
        found["bmm1_scale"] = "bmm1_scale_log2"
    if out is None:
        found["out must have dtype"] = "out_dtype must be"
    return found


def _check_rare(out: Any, rare: tuple[Any, ...]) -> torch.dtype | None:
    """Check arguments that are refused, or that change nothing here. Return the dtype of out, from out_dtype."""
    (out_dtype, o_sf_scale, o_sf_vec_size, skip_softmax, transform_mode, counters, order, order_plan, global_lengths,
     block_sparse, cp_world, cp_rank) = rare  # fmt: skip
    trtllm_options.refuse_nvfp4_output(out, out_dtype, o_sf_scale, o_sf_vec_size)
    trtllm_options.refuse_skipped_softmax(skip_softmax)
    if transform_mode is not None:
        checks.choice("bf16q_fp8kv_transform_mode", transform_mode, ("k_only", "separate_kv"))
    trtllm_options.check_counters(counters)
    reason = "requests share the CTAs by their lengths, in any order"
    checks.refuse_given(reason, request_order=order, request_order_plan=order_plan)
    if checks.boolean("enable_block_sparse_attention", block_sparse):
        instead = "a call per kv head with its own block_tables and seq_lens"
        checks.refuse("enable_block_sparse_attention", "kv heads share their page table", instead)
    one_token = "q_len_per_req=1, or mask"
    trtllm_options.refuse_context_parallelism(cp_world, cp_rank, global_lengths, one_token)
    return trtllm_options.output_dtype(out, out_dtype)


def _q_len(q_len_per_req: Any, max_q_len: Any, cum_seq_lens_q: Any, uniform_q_len: Any) -> Any:
    """Return the query tokens of every request, or the most of any."""
    if (max_q_len is None) != (cum_seq_lens_q is None):
        raise ArgumentError("max_q_len and cum_seq_lens_q must be given together")
    if uniform_q_len is not None:
        expected = 1 if q_len_per_req is None else q_len_per_req
        if checks.integer("uniform_q_len", uniform_q_len) != expected or max_q_len is not None:
            said = f"None or q_len_per_req, {expected}" if max_q_len is None else "None for ragged queries"
            raise ArgumentError(f"uniform_q_len must be {said}, got {uniform_q_len}")
    return q_len_per_req if max_q_len is None else max_q_len


def _check_block_scales(backend: Any, uses_shared_paged_kv_idx: Any) -> None:
    if isinstance(backend, str) and backend == "trtllm-gen":
        feature, reason = 'kv_cache_sf with backend="trtllm-gen"', trtllm_options.INTERLEAVED
        checks.refuse(feature, reason, 'backend="xqa" and scales in order')
    if uses_shared_paged_kv_idx is not True:
        checks.refuse("pages of their own for NVFP4 values", "scales have one table", "one table")
