"""Attention of a mixed batch of prefill and decode requests over a paged cache: `BatchAttention`."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.errors import ArgumentError
from cute_attn.ops import declare, fakes, trace
from cute_attn.request import batch_plan, checks
from cute_attn.request.batch_plan import PlanOptions
from cute_attn.request.batch_run import RunArguments
from cute_attn.request.index_arrays import IndexArrays
from cute_attn.request.plan_arguments import PlanRequest
from cute_attn.wrappers.base import BatchWrapper, Cache, DType, Scale, makes_plan

WORKSPACE_BYTES = 128 << 20  # enough for every batch
NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
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
    LayoutError (`kv_layout`), and what torch raises for `device`.
    """

    kv_source = "paged"

    def __init__(self, kv_layout: str = "NHD", device: torch.device | str = "cuda") -> None:
        self.float_workspace_buffer = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
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
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo : at least 1; num_qo_heads must be a multiple of
            num_kv_heads.
        page_size : tokens per page, at least 1.
        causal : default False. True: token i of a request sees keys j <= i + kv_len - qo_len.
        sm_scale : any finite number. Default `head_dim_qk ** -0.5`.
        logits_soft_cap : soft cap of the logits; None (default), 0 or a negative number: none.
        q_data_type, kv_data_type : torch dtypes or their names, default bfloat16. The output has q's dtype, bfloat16
            for fp8 q. A uint8 cache is NVFP4 and needs `kv_cache_sf` in `run`.
        use_profiler : refused unless False.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.plan`. After an error the previous plan is still in force.
        """
        batch_plan.refuse("use_profiler", use_profiler, NO_PROFILER, "a profiler of the GPU's maker", off=False)
        page_size = batch_plan.count("page_size", page_size)
        arrays = IndexArrays(NAMES, qo_indptr, kv_indptr, kv_indices, page_size=page_size)
        lengths = arrays.on_host_in_tokens(kv_len_arr)
        options = PlanOptions(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            causal=causal,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
        )
        splits = batch_plan.splits(None, False, page_size)
        return PlanRequest(options, lengths, batch_plan.NO_MASK, splits, page_size)

    @declare.operator("batch_attention_run", fakes.batch_attention, is_method=True)
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
        kv_cache, kv_cache_sf : the cache and the block scales of NVFP4, as for
            `BatchPrefillWithPagedKVCacheWrapper.run`.
        out, lse : written and returned instead of new tensors, as for that `run`.
        k_scale, v_scale : factors of k and v, default 1: numbers, or floating-point tensors with one element.
        logits_soft_cap : 0 (default), or the planned one.
        profiler_buffer : refused unless None.

        Returns
        -------
        (out, lse) : out `[qo_indptr[-1], num_qo_heads, head_dim_vo]`, and float32 `[qo_indptr[-1], num_qo_heads]`, base
        2. A token that sees no key has out 0 and lse -inf.

        Raises
        ------
        NotPlannedError (a RuntimeError: no plan yet), ArgumentError (a ValueError: shape, dtype, device, strides or
        value), ArgumentTypeError (a TypeError), NotSupported (a NotImplementedError).
        """
        if is_dynamo_compiling():
            pair: tuple[torch.Tensor, torch.Tensor] = trace.operator("batch_attention_run")(locals())
            return pair
        batch_plan.refuse("profiler_buffer", profiler_buffer, NO_PROFILER, "profiler_buffer=None")
        if logits_soft_cap is not None and checks.real("logits_soft_cap", logits_soft_cap) != 0:
            self._check_soft_cap(logits_soft_cap)
        result = self._run(
            RunArguments(q, kv_cache, None, k_scale, v_scale, out, lse, return_lse=True, kv_cache_sf=kv_cache_sf)
        )
        assert isinstance(result, tuple)
        return result

    def _check_soft_cap(self, logits_soft_cap: Any) -> None:
        """Refuse any soft cap but the planned one: it may be other code."""
        planned = self._in_force().settings.logits_soft_cap
        if max(0.0, checks.real("logits_soft_cap", logits_soft_cap)) != max(0.0, planned):
            raise ArgumentError(
                f"logits_soft_cap of run() must be 0 or the planned {planned}, got {logits_soft_cap}: pass it to plan()"
            )
