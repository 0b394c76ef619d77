"""Decode attention of a batch over a paged cache: `BatchDecodeWithPagedKVCacheWrapper` and its CUDA-graph form."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.ops import declare, fakes, trace
from cute_attn.request import batch_plan, checks
from cute_attn.request.batch_plan import PlanRequest
from cute_attn.request.batch_run import run_arguments
from cute_attn.request.index_arrays import IndexArrays
from cute_attn.wrappers.base import BatchWrapper, Cache, DType, Result, Scale, kept_options, makes_plan, older_form
from cute_attn.wrappers.plan_request import lengths_of
from cute_attn.wrappers.signatures import with_return_lse

NAMES = ("qo_indptr", "indptr", "indices", "last_page_len")
BUFFERS = ("paged_kv_last_page_len_buffer", "paged_kv_indptr_buffer", "paged_kv_indices_buffer")


class BatchDecodeWithPagedKVCacheWrapper(BatchWrapper):
    """Decode attention of a batch: one new token per request (or `q_len_per_req`) over its keys in a paged cache.

    The keys include those of the new tokens; of several tokens, each sees the keys up to its own. `plan` takes the
    lengths and everything that decides which code runs; `run` takes the tensors, any number of times (once per layer).
    Formulas: `single_decode_with_kv_cache`.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, backend : as for `BatchPrefillWithPagedKVCacheWrapper`.
    use_cuda_graph : default False. True keeps addresses and launches across plans, as there. Batch size, options and
        dtypes must stay those of the first plan.
    use_tensor_cores : a hint; tensor cores are always used.
    paged_kv_indptr_buffer, paged_kv_last_page_len_buffer : int32 `[batch_size + 1]` and `[batch_size]`. Required with
        `use_cuda_graph`, otherwise not used; so is the next.
    paged_kv_indices_buffer : int32, with at least as many elements as any plan has pages.
    jit_args : refused unless None.

    Raises
    ------
    The errors of `BatchPrefillWithPagedKVCacheWrapper`.
    """

    kv_source = "paged"
    older_order = "q_scale, k_scale, v_scale"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        given = locals()
        checks.refuse_given(batch_plan.JIT_REASON, batch_plan.JIT_INSTEAD, None, jit_args=jit_args)
        self._use_tensor_cores = checks.boolean("use_tensor_cores", use_tensor_cores)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._set_graph_buffers(**{name: given[name] for name in BUFFERS})

    @property
    def use_tensor_cores(self) -> bool:
        """The constructor's argument, which changes nothing."""
        return self._use_tensor_cores

    @makes_plan
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        # By keyword in FlashInfer 0.7.2, which still takes those up to q_len_per_req in this order and tests that it
        # does (test_batch_decode_plan_deprecated_positional_args_warn_and_bind).
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        lse_base: str = "log2",
    ) -> PlanRequest:
        """Schedule a batch: request i has the pages `indices[indptr[i]:indptr[i + 1]]`.

        Index arrays are int32 or int64. No plan waits for the GPU: index arrays there are read by a kernel (on fa2 it
        makes the schedule; XQA needs none), and with `use_cuda_graph` a plan after the first may be captured: replays
        read the index arrays again. Values on the GPU are not checked; wrong ones give wrong results, but reach no
        memory outside `indices` and the plan. With `fixed_split_size` where some batch might not fit, and with
        CUTE_ATTN_VALIDATE=1, `indptr` and `last_page_len` on a GPU cost a synchronisation each.

        Parameters
        ----------
        indptr : `[batch_size + 1]`, not decreasing.
        indices, last_page_len : `paged_kv_indices` and `paged_kv_last_page_len` of
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, page_size, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
            rope_theta, non_blocking, block_tables, fixed_split_size, disable_split_kv, lse_base : as for
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        head_dim : of q, k, v and the output, at least 1.
        window_right : refused unless 0: keys to the right of a token are never seen.
        q_data_type, kv_data_type, o_data_type : dtypes as there. Default of q: `data_type`, else float16. Default of
            kv: `data_type`, else q's. Default of o: q's, bfloat16 for fp8 q.
        data_type : default of `q_data_type` and `kv_data_type`.
        seq_lens : `[batch_size]`, the lengths of the keys; on the CPU they are checked against index arrays that the
            host reads, on a GPU they are not read.
        q_len_per_req : query tokens of every request, at least 1 (default).
        is_causal : None (default), or whether `q_len_per_req` is more than 1: each token sees the keys up to its own.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.plan`. After an error the previous plan is still in force.
        """
        given = batch_plan.decode_arguments(
            page_size, non_blocking, window_right, q_len_per_req, is_causal, fixed_split_size, disable_split_kv,
            data_type, num_qo_heads, num_kv_heads, head_dim, None, q_data_type, kv_data_type, o_data_type,
            pos_encoding_mode, False, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, lse_base,
        )  # fmt: skip
        pages = indptr, indices, last_page_len, given.page_size
        lengths = lengths_of(self._place, IndexArrays(NAMES, None, *pages, given.max_qo_len))
        batch_plan.repeated_lengths(lengths, seq_lens)
        if block_tables is not None:
            checks.tensor("block_tables", block_tables)
        return PlanRequest(*given[:6], lengths)  # faster than `_replace`

    begin_forward = plan

    @declare.operator("paged_decode_run", fakes.attention)
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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> Result:
        """Compute the attention of the planned batch.

        Parameters
        ----------
        q : `[batch_size * q_len_per_req, num_qo_heads, head_dim]` of the planned dtype, grouped by request; strides as
            for `BatchPrefillWithPagedKVCacheWrapper.run`.
        paged_kv_cache, q_scale, k_scale, v_scale, return_lse, enable_pdl, window_left, sinks, kv_cache_sf : as for
            `BatchPrefillWithPagedKVCacheWrapper.run`.
        args : `scale_q, scale_k, scale_v` of fp8 attention, as there.
        out, lse : written instead of new tensors, as there: q's shape in the planned output dtype, and contiguous
            float32 `[batch_size * q_len_per_req, num_qo_heads]`.
        q_len_per_req : None, or the planned one; deprecated.
        skip_softmax_threshold_scale_factor : refused unless None.

        Returns
        -------
        out `[batch_size * q_len_per_req, num_qo_heads, head_dim]`, or with `return_lse` the pair of it and the float32
        lse `[batch_size * q_len_per_req, num_qo_heads]`, of base 2 unless the plan's `lse_base` says otherwise. A token
        that sees no key has out 0 and lse -inf.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        if is_dynamo_compiling():
            return trace.operator("paged_decode_run")(locals())
        if skip_softmax_threshold_scale_factor is not None:
            given: dict[str, Any] = {"skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor}
            checks.refuse_given("softmax is exact", off=None, **given)
        if q_len_per_req is not None:
            warnings.warn("q_len_per_req belongs to plan()", DeprecationWarning, stacklevel=2)
            planned = self._in_force().request.lengths.q_len
            agrees = checks.integer("q_len_per_req", q_len_per_req) == planned
            checks.as_planned(agrees, "q_len_per_req", q_len_per_req, planned)
        return self._run(
            run_arguments((
                q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left,
                sinks, kv_cache_sf, args or None, None,
            ))
        )  # fmt: skip

    run_return_lse = with_return_lse(run)

    @declare.operator("paged_decode_forward", fakes.attention)
    @older_form
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Result:
        """Run with other options than the planned ones: FlashInfer's older form of `run`."""
        if is_dynamo_compiling():
            return trace.operator("paged_decode_forward")(locals())
        return self._forward(locals())

    forward_return_lse = with_return_lse(forward)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph=True` and backend "auto".

    Parameters
    ----------
    workspace_buffer : its `float_workspace_buffer`.
    indptr_buffer, indices_buffer, last_page_len_buffer : its index buffers: int32 `[batch_size + 1]`, any size, and
        `[batch_size]`.
    kv_layout, use_tensor_cores : as there.

    Raises
    ------
    The errors of `BatchDecodeWithPagedKVCacheWrapper`.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan without synchronisation, with lengths that the host knows.

    Calls `BatchDecodeWithPagedKVCacheWrapper.plan`, with the `o_data_type` and `lse_base` of the plan before. Also good
    as a replacement of the method: `wrapper.plan = functools.partial(fast_decode_plan, wrapper)`, or of
    `wrapper.begin_forward`.

    Parameters
    ----------
    wrapper : a BatchDecodeWithPagedKVCacheWrapper.
    indptr, last_page_len : arguments of `BatchDecodeWithPagedKVCacheWrapper.plan`. On a GPU each costs a
        synchronisation where that method says so, unless it is not read: `indptr` with `global_override_indptr_cpu`,
        `last_page_len` with a page size of 1.
    global_override_indptr_cpu : int32 or int64 `[batch_size + 1]` on the CPU, replaces `indptr`. Default None.
    indices, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap,
        q_data_type, kv_data_type, data_type, sm_scale, rope_scale, rope_theta, non_blocking, fixed_split_size,
        disable_split_kv, q_len_per_req : arguments of `BatchDecodeWithPagedKVCacheWrapper.plan`, with the same
        defaults.

    Raises
    ------
    ArgumentTypeError (wrapper of another type), and the errors of `plan`.
    """
    given = locals().copy()
    kept = kept_options(given.pop("wrapper"), BatchDecodeWithPagedKVCacheWrapper)
    if (on_host := given.pop("global_override_indptr_cpu")) is not None:
        given["indptr"] = checks.tensor("global_override_indptr_cpu", on_host)
    if batch_plan.count("page_size", page_size) == 1:
        indptr = checks.tensor("indptr", given["indptr"])
        given["last_page_len"] = torch.ones(max(0, indptr.numel() - 1), dtype=torch.int32, device=indptr.device)
    given.update((name, kept[name]) for name in ("o_data_type", "lse_base") if name in kept)
    BatchDecodeWithPagedKVCacheWrapper.plan(wrapper, **given)  # the method may have been replaced by this function
