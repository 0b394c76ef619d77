"""Batches of prefill and decode requests in one launch (`BatchAttention`), and causal prefill with a range of keys per
query token (`BatchPrefillWithCausalBidirectionalRangesWrapper`); with attention sinks: `wrappers/paged_prefill.py`.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.ops import declare, fakes, trace
from cute_attn.request import batch_plan, checks, key_ranges, sink_variant
from cute_attn.request.batch_plan import PlanOptions, PlanRequest
from cute_attn.request.batch_run import RunArguments
from cute_attn.request.index_arrays import IndexArrays
from cute_attn.request.key_ranges import KeyRanges
from cute_attn.wrappers.base import BatchWrapper, Cache, DType, Result, Scale, makes_plan
from cute_attn.wrappers.paged_prefill import PAGED_BUFFERS, PAGED_NAMES, BatchAttentionWithAttentionSinkWrapper
from cute_attn.wrappers.plan_request import prefill_request
from cute_attn.wrappers.signatures import with_return_lse

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
]

WORKSPACE_BYTES = 128 << 20  # enough for every batch
NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
MADE_FOR = ("q_data_type", "kv_data_type", "o_data_type", "head_dim_qk", "head_dim_vo", "pos_encoding_mode")
NOT_HERE = {  # arguments of other prefill wrappers
    **dict.fromkeys(("rope_scale", "rope_theta", "seq_lens", "seq_lens_q", "uniform_q_len")),
    "lse_base": "log2",
}
NO_PROFILER = "no kernel records a profile"


class BatchAttention(BatchWrapper):
    """Attention of a batch over a paged cache, prefill and decode requests in one launch.

    The batch is scheduled as `BatchPrefillWithPagedKVCacheWrapper` schedules one, a request with a single query token
    among the others. Unlike that wrapper, it owns its workspace, takes lengths in tokens, and `run` always returns out
    and lse. Formulas: `single_prefill_with_kv_cache`.

    Parameters
    ----------
    kv_layout : "NHD" (default) or "HND", of the cache.
    device : of the tensors, default "cuda". 128 MB of workspace are allocated on it.

    Raises
    ------
    ArgumentError (`device`), LayoutError (`kv_layout`), and what torch raises for a device that is not there.
    """

    kv_source = "paged"

    def __init__(self, kv_layout: str = "NHD", device: torch.device | str = "cuda") -> None:
        place = checks.usable_device("device", torch.get_default_device() if device is None else device)
        self.float_workspace_buffer = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=place)
        super().__init__(self.float_workspace_buffer, kv_layout, False, "auto")

    @makes_plan
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType | None = torch.bfloat16,
        use_profiler: bool = False,
    ) -> PlanRequest:
        """Schedule a batch. Request i has the query tokens `qo_indptr[i]:qo_indptr[i + 1]`.

        Index arrays are int32 or int64. On a GPU each but `kv_indices` costs a synchronisation, on the CPU none.

        Parameters
        ----------
        qo_indptr, kv_indptr : `[batch_size + 1]`, not decreasing.
        kv_indices : 1-D, page numbers; those of request i are at `kv_indptr[i]:kv_indptr[i + 1]`. An int32 tensor on
            the wrapper's device is not copied: it must not change until the last run.
        kv_len_arr : `[batch_size]`, tokens of each request, at most those of its pages.
        num_qo_heads, num_kv_heads, head_dim_qk, page_size, sm_scale, logits_soft_cap : as for
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        causal : default False. True: token i of a request sees keys j <= i + kv_len - qo_len.
        head_dim_vo : at least 1.
        q_data_type, kv_data_type : as there, but default bfloat16. The output has q's dtype, bfloat16 for fp8 q.
        use_profiler : refused unless False.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.plan`. After an error the previous plan is still in force.
        """
        checks.refuse_given(NO_PROFILER, "a profiler of the GPU's maker", use_profiler=use_profiler)
        page_size = batch_plan.count("page_size", page_size)
        arrays = IndexArrays(NAMES, qo_indptr, kv_indptr, kv_indices, page_size=page_size)
        lengths = arrays.on_host_in_tokens(kv_len_arr)
        return PlanRequest(PlanOptions.of(locals()), page_size=page_size, lengths=lengths)

    @declare.operator("batch_attention_run", fakes.attention)
    def run(
        self,
        q: torch.Tensor,
        kv_cache: Cache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        logits_soft_cap: float | None = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of the planned batch.

        Parameters
        ----------
        q : `[qo_indptr[-1], num_qo_heads, head_dim_qk]` of the planned dtype.
        kv_cache, out, lse, k_scale, v_scale, kv_cache_sf : cache, outputs and scales, as for
            `BatchPrefillWithPagedKVCacheWrapper.run`.
        logits_soft_cap : 0 (default), or the planned one.
        profiler_buffer : refused unless None.

        Returns
        -------
        (out, lse) : out `[qo_indptr[-1], num_qo_heads, head_dim_vo]`, and float32 `[qo_indptr[-1], num_qo_heads]`, base
        2. A token that sees no key has out 0 and lse -inf.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        if is_dynamo_compiling():
            return trace.operator("batch_attention_run")(locals())
        checks.refuse_given(NO_PROFILER, off=None, profiler_buffer=profiler_buffer)
        if logits_soft_cap is not None and checks.real("logits_soft_cap", logits_soft_cap) != 0:
            planned = self._in_force().settings.logits_soft_cap
            agrees = max(0.0, logits_soft_cap) == max(0.0, planned)
            checks.as_planned(agrees, "logits_soft_cap", logits_soft_cap, planned, "0 or ")
        result = self._run(
            RunArguments(q, kv_cache, None, k_scale, v_scale, out, lse, return_lse=True, kv_cache_sf=kv_cache_sf)
        )
        assert isinstance(result, tuple)
        return result


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchWrapper):
    """Prefill of a batch over a paged cache whose tokens see causal keys and those of a range of their own.

    The tokens of an image see each other in both directions, the text around them stays causal. Ranges are data of a
    run on the device: no mask is made of them, and no call waits for them. Schedules assume that every token sees all
    keys of its request; kernels leave out the tiles that no token of a query tile sees.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
        paged_kv_last_page_len_buf : as for `BatchPrefillWithPagedKVCacheWrapper`.
    pos_encoding_mode : "NONE" (default), "ROPE_LLAMA" or "ALIBI". FlashInfer takes "NONE" only.
    q_data_type, kv_data_type, o_data_type : torch dtypes or their names; what a plan takes where it names none. Default
        bfloat16, bfloat16 and that of q.
    head_dim_qk, head_dim_vo : default 128. Plans must name the same; without `head_dim_vo` they take this one.
    backend : as for `BatchPrefillWithPagedKVCacheWrapper`. "auto" (default) takes fa2; fa4, fa3 and xqa refuse.

    Raises
    ------
    The errors of `BatchPrefillWithPagedKVCacheWrapper`.
    """

    kv_source = "paged"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        o_data_type: DType | None = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        backend: str = "auto",
    ) -> None:
        given = locals()
        sink_variant.made_for(q_data_type, kv_data_type, head_dim_qk, head_dim_vo, pos_encoding_mode)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._set_graph_buffers(**{name: given[name] for name in PAGED_BUFFERS})
        self._place = self._place._replace(key_ranges=True)
        self._made_for = {name: given[name] for name in MADE_FOR}

    @makes_plan
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
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> PlanRequest:
        """Plan a batch.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, page_size,
            use_fp16_qk_reduction, sm_scale, logits_soft_cap, non_blocking, max_token_per_sequence, max_sequence_kv,
            fixed_split_size, disable_split_kv : as for `BatchPrefillWithPagedKVCacheWrapper.plan`.
        head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type, pos_encoding_mode : those of the constructor.
            Dtypes and `head_dim_vo` that are None (default) stand for them.
        custom_mask, packed_custom_mask, causal, window_left, prefix_len_ptr, token_pos_in_items_ptr,
            token_pos_in_items_len, max_item_len_ptr : refused but for their defaults: `run` says which keys are seen.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.plan`; ArgumentError also for dtypes, head dimensions or a
        position encoding that are not the constructor's.
        """
        given = locals()
        key_ranges.check_plan(given, self._made_for)
        return prefill_request(self._place, {**given, **self._made_for, **NOT_HERE}, PAGED_NAMES)

    begin_forward = plan

    @declare.operator("ranges_prefill_run", fakes.attention)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Cache | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Result:
        """Compute the attention of the planned batch.

        Token i of a request stands at position p = i + kv_len - qo_len. It sees key j if p - causal_window_left <= j <=
        p, or if start <= j <= end and j > p - range_window_left.

        Parameters
        ----------
        q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, kv_cache_sf, sinks : as for
            `BatchPrefillWithPagedKVCacheWrapper.run`.
        bidirectional_ranges : contiguous int32 `[rows of q, 2]` on q's device, 8-byte aligned: the first and the last
            key, both seen, of each token's range, counted from the first key of its request; (-1, -1) for none. Keys
            past the request's end do not count. A captured run reads it at its address.
        causal_window_left : >= 0: keys before the token's own that are seen besides those of its range. Negative
            (default): all.
        range_window_left : > 0: a token sees no key of its range that is as many or more keys before its own. 0 or
            negative (default): all. The part of a range behind the token is never cut.

        Returns
        -------
        As `BatchPrefillWithPagedKVCacheWrapper.run`.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.run`; ArgumentError also for ranges of another shape, dtype,
        device, alignment or stride, and ArgumentTypeError for windows that are no integers.
        """
        if is_dynamo_compiling():
            return trace.operator("ranges_prefill_run")(locals())
        return self._run(
            RunArguments(
                q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, None, sinks,
                kv_cache_sf, None, KeyRanges(bidirectional_ranges, causal_window_left, range_window_left),
            )
        )  # fmt: skip

    run_return_lse = with_return_lse(run)
