"""Prefill and append attention of a batch over a paged cache: `BatchPrefillWithPagedKVCacheWrapper`, and its form with
attention sinks.

Each request is computed as `single_prefill_with_kv_cache` computes one; the formulas are in its docstring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.ops import declare, fakes, trace
from cute_attn.request import batch_plan, checks, sink_variant
from cute_attn.request.batch_plan import PlanRequest
from cute_attn.request.batch_run import run_arguments
from cute_attn.wrappers.base import BatchWrapper, Cache, DType, Result, Scale, kept_options, makes_plan, older_form
from cute_attn.wrappers.plan_request import prefill_request
from cute_attn.wrappers.signatures import accepts_older_names, with_return_lse

PAGED_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
PAGED_BUFFERS = tuple(f"{name}_buf" for name in PAGED_NAMES)
MASK_BUFFERS = ("custom_mask_buf", "mask_indptr_buf")
# Arguments of a wrapper's constructor, with attention sinks and without.
OF_BOTH = ("float_workspace_buffer", "kv_layout", "use_cuda_graph", "backend", *PAGED_BUFFERS, *MASK_BUFFERS)


class BatchPrefillWithPagedKVCacheWrapper(BatchWrapper):
    """Prefill or append attention of a batch of requests whose keys and values are in pages of a common cache.

    `plan` takes the lengths and everything that decides which code runs; `run` takes the tensors, any number of times
    (once per layer). Formulas: `single_prefill_with_kv_cache`.

    Parameters
    ----------
    float_workspace_buffer : contiguous, any dtype, 16-byte aligned. It holds partial results where keys are split.
        128 MB are enough for every batch without `fixed_split_size`; with it, `workspace_size` computes the need.
        Wrappers that run one after the other may share it. Its device is the wrapper's.
    kv_layout : "NHD" (default) or "HND", of the cache.
    use_cuda_graph : default False. True keeps addresses and launches across plans, so that a captured `run` can be
        replayed after `plan` with other lengths. Batch size, options, dtypes and `qo_indptr[0]` must stay those of the
        first plan, which also sets the upper bound of query tokens (`qo_indptr[-1]`).
    qo_indptr_buf, paged_kv_indptr_buf : int32 `[batch_size + 1]`. Required with `use_cuda_graph`, otherwise not used;
        so are the next two.
    paged_kv_indices_buf : int32, with at least as many elements as any plan has pages.
    paged_kv_last_page_len_buf : int32 `[batch_size]`.
    custom_mask_buf, mask_indptr_buf (older name `qk_indptr_buf`) : uint8 with room for the packed bits of all requests,
        and int32 `[batch_size + 1]`, which receives their byte offsets. Required with `use_cuda_graph` if plans have
        custom masks.
    backend : "auto" (default), "fa4", "fa3", "xqa", "fa2", "reference" or "emulator"; `cute_attn.explain` tells which
        supports what. If a run adds features that the planned backend refuses (an expanded cache), "auto" plans again
        for one that supports them; a named backend, or `use_cuda_graph`, raises NotSupported.
    jit_args, jit_kwargs : None, or those of FlashInfer's variant with attention sinks (its name starts with
        "batch_prefill_attention_sink"): plans must then name its dtypes and head dimensions, and `run` takes sinks and
        sm_scale by position. All others are refused.
    variant_owns_mask : refused unless False.

    Raises
    ------
    ArgumentTypeError (not a tensor or bool), ArgumentError (shape, dtype, device or alignment of a buffer; a missing
    buffer), LayoutError (`kv_layout`, `backend`), NotSupported (`jit_args`, `jit_kwargs`, a backend of FlashInfer that
    is not part of this library).
    """

    kv_source = "paged"
    older_order = "k_scale, v_scale, return_lse"

    @accepts_older_names
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        given = locals()
        self._sink_variant = sink_variant.from_jit(jit_args, jit_kwargs, variant_owns_mask)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._set_graph_buffers(**{name: given[name] for name in (*PAGED_BUFFERS, *MASK_BUFFERS)})

    @makes_plan
    @accepts_older_names
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        *,
        lse_base: str = "log2",
    ) -> PlanRequest:
        """Schedule a batch. Request i has the query tokens `qo_indptr[i]:qo_indptr[i + 1]`.

        Index arrays are int32 or int64. No plan waits for the GPU: a kernel makes the schedule, of index arrays on the
        CPU from an upload. For those on the GPU it is launched by the first run, whose q tells the number of
        rows (rows of q that belong to no request keep what out and lse hold); with `use_cuda_graph`, every plan after
        that run launches it, and may be captured: replays read the index arrays again. Values on the GPU are not
        checked; wrong ones give wrong results, but reach no other memory. Arguments that need lengths on the host cost
        a synchronisation per index array: masks, `prefix_len_ptr`, `uniform_q_len`, and `fixed_split_size` where some
        batch might not fit; so does CUTE_ATTN_VALIDATE=1, which checks values.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr : `[batch_size + 1]`, not decreasing.
        paged_kv_indices : 1-D, page numbers; those of request i are at `paged_kv_indptr[i]:paged_kv_indptr[i + 1]`. An
            int32 tensor on the wrapper's device is not copied: it must not change until the last run.
        paged_kv_last_page_len : `[batch_size]`, tokens in the last page, within 1..page_size. Ignored for a request
            without pages, whose kv_len is 0.
        num_qo_heads, num_kv_heads, head_dim_qk (older name `head_dim`) : at least 1; num_qo_heads must be a multiple of
            num_kv_heads. The heads are the most that a run may have: where its tensors have fewer, those count.
        page_size : tokens per page, at least 1.
        head_dim_vo : default `head_dim_qk`.
        custom_mask : 1-D bool (or uint8), the `[qo_len, kv_len]` masks of all requests, flattened and concatenated;
            True keeps. Replaces `causal`; `window_left` still applies.
        packed_custom_mask : 1-D uint8, the same bits in **little** bit order, each request from a new byte on, as
            `segment_packbits(..., bitorder="little")` packs them. Not one row of bits (`packbits`): that is another
            mask for a batch of several requests, and another number of bytes is an error. A contiguous tensor on the
            wrapper's device is not copied without CUDA graphs: it must not change until the last run. Replaces
            `custom_mask`.
        causal, pos_encoding_mode, use_fp16_qk_reduction (older name `allow_fp16_qk_reduction`), sm_scale, window_left,
            logits_soft_cap, rope_scale, rope_theta : as in `single_prefill_with_kv_cache`, with the same defaults;
            positions count within the request.
        q_data_type, kv_data_type, o_data_type : torch dtypes or their names: float16 (default of q) or bfloat16, or
            fp8 where a backend supports it; o also float32. Default of kv: q's. Default of o: q's, bfloat16 for fp8 q.
            A uint8 cache is NVFP4 and needs `kv_cache_sf` in `run`.
        non_blocking : a hint; copies are ordered on the current stream either way.
        seq_lens, seq_lens_q : `[batch_size]`, the lengths of keys and queries; on the CPU they are checked against the
            index arrays, on a GPU they are not read.
        max_token_per_sequence, max_sequence_kv : upper bounds of the lengths of queries and keys. Default None. Checked
            against index arrays on the CPU. Of index arrays on the GPU they are promises, by which "auto" takes kernels
            of decode for few query tokens; where one is not kept, any token may be without result. CUDA graphs ignore
            them.
        block_tables : a tensor with the pages of each request; not read.
        prefix_len_ptr : multi-item scoring, where a request is a prefix followed by items that do not see each other:
            `[batch_size]`, or no dimension for one request, the keys of each prefix; None (default): none. A token at
            position p = i + kv_len - qo_len >= prefix_len sees the keys j < prefix_len, and the p - t < j <= p of its
            own item, t being its position in the item: a delimiter (t = 0) sees the prefix alone. A token of the prefix
            sees j <= p. `causal` is without effect, `window_left` still applies (as in FlashInfer's fa2; its fa3 leaves
            the items' mask out of the tiles at a window's edge), a custom mask is refused. This and the next three are
            read now, not during `run` as in FlashInfer; dtypes uint16, uint32, int32 or int64, each a synchronisation
            if on a GPU.
        token_pos_in_items_ptr : 1-D; that of request r for key prefix_len + n is `[r * token_pos_in_items_len + n]`. It
            may drop, but not grow by more than 1, from token to token. Required with `prefix_len_ptr`.
        token_pos_in_items_len : elements per request, at least kv_len - prefix_len; not read for one request.
        max_item_len_ptr : `[batch_size]`, the largest position in items of each request; only checked. Default None.
        fixed_split_size : pages per split of the keys. The results of a request then do not depend on the rest of the
            batch, bit for bit. Default None, which -1 stands for: splits fill the GPU.
        disable_split_kv : default False. True: no splits, whatever `fixed_split_size` says; results then do not depend
            on the rest of the batch either.
        uniform_q_len : with `use_cuda_graph` a promise that every request has that many query tokens, in this plan and
            all later ones, which makes captured launches smaller; of few causal tokens "auto" then takes kernels of
            decode where these are faster. None (default), 0 or less: no promise. A first plan for which it is not true
            warns and goes without; otherwise it has no effect on results.
        lse_base : "log2" (FlashInfer's, default) or "ln", of the lse that `run` returns.

        Raises
        ------
        ArgumentError (a ValueError: shape, dtype, device or value; with `use_cuda_graph` also a change of what the
        first plan fixed), ArgumentTypeError (a TypeError), LayoutError (a KeyError: `pos_encoding_mode`, `lse_base`),
        WorkspaceError (a RuntimeError: the workspace is too small for `fixed_split_size`), NotSupported (a
        NotImplementedError that lists why no backend, or not this one, supports the batch). After an error the
        previous plan is still in force.
        """
        if block_tables is not None:
            checks.tensor("block_tables", block_tables)
        return prefill_request(self._place, locals(), PAGED_NAMES, self._sink_variant)

    begin_forward = plan

    @declare.operator("paged_prefill_run", fakes.attention)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str | None = None,
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Cache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Compute the attention of the planned batch.

        Parameters
        ----------
        q : `[qo_indptr[-1], num_qo_heads, head_dim_qk]` of the planned dtype. Any strides; a last axis without unit
            stride, or rows that are not 16-byte aligned, cost a copy. Rows before `qo_indptr[0]` belong to no request:
            their out is 0 and lse -inf; in `out` and `lse` of the caller they are not written.
        paged_kv_cache : a pair (k, v) of `[pages, page_size, num_kv_heads, head_dim]` ("NHD") or
            `[pages, num_kv_heads, page_size, head_dim]` ("HND"), or one tensor with an axis of 2 after the first; of
            the planned dtype. Any strides with unit stride on the last axis; on a GPU rows must be 16-byte aligned, of
            fp8 and NVFP4 under a 16-bit q 8-byte aligned. With a page size of 1 the page axis may be missing. Past a
            request's tokens, pages may hold anything; within them v must be finite even where no query sees it: NaN may
            reach every row of the request and kv head.
        args : `scale_q, scale_k, scale_v` of fp8 attention: floating-point `[num_qo_heads]`, `[num_kv_heads]` and
            `[num_kv_heads]`. In the variant with attention sinks: sinks, and sm_scale, which replaces the planned one.
        q_scale, k_scale, v_scale : factors of q, k and v, default 1: numbers, or floating-point tensors with one
            element. A tensor on the GPU is read by the kernel, without synchronisation.
        out : written and returned instead of a new tensor: `[qo_indptr[-1], num_qo_heads, head_dim_vo]` of the planned
            output dtype, unit stride on the last axis, rows 16-byte aligned, no memory in common with the inputs, the
            workspace or the plan's index arrays.
        lse : written instead of a new tensor: contiguous float32 `[qo_indptr[-1], num_qo_heads]`. Returned if
            `return_lse`.
        return_lse : return `(out, lse)`. `run_return_lse` is `run` with True as the default.
        lse_base : None (default: that of the plan), "log2" or "ln", of the lse of this run.
        lse_layout : "NH" (default), or "HN": lse, the caller's too, is contiguous `[num_qo_heads, qo_indptr[-1]]`. What
            differs from the plan's base and "NH" costs a torch operation after the launch.
        enable_pdl, sinks : as in `single_prefill_with_kv_cache`.
        window_left : None, or the planned one.
        kv_cache_sf : (k_sf, v_sf) for an NVFP4 (uint8) cache, shaped like it with head_dim / 16 on the last axis: e4m3,
            or its bytes as uint8, one scale per 16 values. Required with `kv_data_type` uint8, refused otherwise.
            Global scales are `k_scale` and `v_scale`.
        skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress : refused unless None or False.

        Returns
        -------
        out `[qo_indptr[-1], num_qo_heads, head_dim_vo]`, or with `return_lse` the pair of it and the float32 lse
        `[qo_indptr[-1], num_qo_heads]`, of base 2 unless the plan's `lse_base` says otherwise. A token that sees no key
        has out 0 and lse -inf.

        Raises
        ------
        NotPlannedError (a RuntimeError: no plan yet), ArgumentError (a ValueError: shape, dtype, device, strides or
        value), ArgumentTypeError (a TypeError), NotSupported (a NotImplementedError: the planned backend, or every
        backend, refuses what this run adds).
        """
        if is_dynamo_compiling():
            return trace.operator("paged_prefill_run")(locals())
        if not (skip_softmax_threshold_scale_factor is use_fp16_softmax is uses_spcompress is None):
            checks.refuse_given(
                "softmax is exact and in fp32",
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                use_fp16_softmax=use_fp16_softmax,
                uses_spcompress=uses_spcompress,
            )
        head_scales = args or None
        if self._sink_variant is not None:
            planned_scale = self._in_force().settings.sm_scale
            sinks, q_scale = self._sink_variant.operands(args, planned_scale, sinks, q_scale)
            head_scales = None
        arguments = run_arguments((
            q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks,
            kv_cache_sf, head_scales, None,
        ))  # fmt: skip
        if lse_base is not None or not isinstance(lse_layout, str) or lse_layout != "NH":
            return self._run(arguments, (lse_base, lse_layout))
        return self._run(arguments)

    run_return_lse = with_return_lse(run)

    @declare.operator("paged_prefill_forward", fakes.attention)
    @older_form
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
        allow_fp16_qk_reduction: bool | None = None,
    ) -> Result:
        """Run with other options than the planned ones: FlashInfer's older form of `run`."""
        if is_dynamo_compiling():
            return trace.operator("paged_prefill_forward")(locals())
        return self._forward(locals())

    forward_return_lse = with_return_lse(forward)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill, append or decode attention of a batch over a paged cache, with attention sinks.

    A `BatchPrefillWithPagedKVCacheWrapper` whose `run` takes two more arguments by position after the cache: sinks,
    floating-point `[num_qo_heads]`, a term exp(sink) of each softmax denominator; and sm_scale, a number that replaces
    the planned one (default: the planned one). Another sm_scale needs no new plan, and may be captured in a CUDA graph.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
        paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend : as for
        `BatchPrefillWithPagedKVCacheWrapper`.
    q_data_type, kv_data_type : torch dtypes or their names, default bfloat16. Plans must name the same.
    head_dim_qk, head_dim_vo : default 128. Plans must name the same.
    pos_encoding_mode : "NONE" (default), "ROPE_LLAMA" or "ALIBI". Plans must name the same.
    window_left : an int. Plans bring their own window; FlashInfer compiles for one or none.
    use_fp16_qk_reduction : a hint; scores are always accumulated in fp32.

    Raises
    ------
    The errors of `BatchPrefillWithPagedKVCacheWrapper`.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType | None = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        given = locals()
        checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
        checks.integer("window_left", window_left)
        variant = sink_variant.made_for(q_data_type, kv_data_type, head_dim_qk, head_dim_vo, pos_encoding_mode)
        super().__init__(**{name: given[name] for name in OF_BOTH})
        self._sink_variant = variant


def fast_prefill_plan(
    wrapper: BatchPrefillWithPagedKVCacheWrapper,
    qo_indptr: torch.Tensor,
    paged_kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    page_size: int,
    head_dim_vo: int | None = None,
    custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    window_left: int = -1,
    q_data_type: DType = "float16",
    kv_data_type: DType | None = None,
    o_data_type: DType | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    prefix_len_ptr: torch.Tensor | None = None,
    token_pos_in_items_ptr: torch.Tensor | None = None,
    token_pos_in_items_len: int = 0,
    max_item_len_ptr: torch.Tensor | None = None,
    *,
    qo_indptr_host: torch.Tensor,
    kv_indptr_host: torch.Tensor,
    kv_lens_host: torch.Tensor,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    uniform_verify_width: int | None = None,
) -> None:
    """Plan without synchronisation, with lengths that the host knows.

    Calls `BatchPrefillWithPagedKVCacheWrapper.plan`; options that are not arguments here, and `o_data_type` where it is
    None, stay those of the plan before. Also good as a replacement of the method: `wrapper.begin_forward =
    functools.partial(fast_prefill_plan, wrapper)`. SGLang's FlashInfer backend calls a function of this form, which may
    be replaced by this one.

    Parameters
    ----------
    wrapper : a BatchPrefillWithPagedKVCacheWrapper.
    qo_indptr, paged_kv_indptr, paged_kv_last_page_len : not read; the next three say it on the host.
    qo_indptr_host, kv_indptr_host : int32 or int64 `[batch_size + 1]` on the CPU: `qo_indptr` and `paged_kv_indptr`.
    kv_lens_host : int32 or int64 `[batch_size]` on the CPU: keys of each request, which must need the pages that
        `kv_indptr_host` counts.
    max_q_len, max_kv_len : upper bounds of the lengths; checked. Default None.
    uniform_verify_width : None (default), or the query tokens of every request; checked.
    paged_kv_indices, num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo, custom_mask, causal, window_left,
        q_data_type, kv_data_type, o_data_type, non_blocking, fixed_split_size, prefix_len_ptr, token_pos_in_items_ptr,
        token_pos_in_items_len, max_item_len_ptr : arguments of `BatchPrefillWithPagedKVCacheWrapper.plan`, with the
        same defaults.

    Raises
    ------
    ArgumentTypeError (wrapper of another type), ArgumentError (lengths on a GPU, or that contradict each other), and
    the errors of `plan`.
    """
    given = locals().copy()
    kept = kept_options(given.pop("wrapper"), BatchPrefillWithPagedKVCacheWrapper)
    lengths = qo_indptr_host, kv_indptr_host, kv_lens_host, uniform_verify_width
    last_page_len = batch_plan.last_page_len_of_host(*lengths, batch_plan.count("page_size", page_size))
    given.update(qo_indptr=qo_indptr_host, paged_kv_indptr=kv_indptr_host, paged_kv_last_page_len=last_page_len)
    given.update(max_token_per_sequence=given.pop("max_q_len"), max_sequence_kv=given.pop("max_kv_len"))
    for name in ("qo_indptr_host", "kv_indptr_host", "kv_lens_host", "uniform_verify_width"):
        del given[name]
    stay = ["pos_encoding_mode", "sm_scale", "logits_soft_cap", "rope_scale", "rope_theta", "lse_base"]
    stay += ["o_data_type"] * (o_data_type is None)
    given.update((name, kept[name]) for name in stay if name in kept)
    BatchPrefillWithPagedKVCacheWrapper.plan(wrapper, **given)  # the method may have been replaced by this function
