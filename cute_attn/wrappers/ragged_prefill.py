"""Prefill and append attention of a batch over ragged keys and values: `BatchPrefillWithRaggedKVCacheWrapper`.

Each request is computed as `single_prefill_with_kv_cache` computes one; the formulas are in its docstring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.ops import declare, fakes, trace
from cute_attn.request import checks, operands, sink_variant
from cute_attn.request.batch_plan import PlanRequest
from cute_attn.request.batch_run import run_arguments
from cute_attn.wrappers.base import BatchWrapper, DType, Result, Scale, makes_plan, older_form
from cute_attn.wrappers.plan_request import prefill_request
from cute_attn.wrappers.signatures import accepts_older_names, with_return_lse

NAMES = ("qo_indptr", "kv_indptr")


class BatchPrefillWithRaggedKVCacheWrapper(BatchWrapper):
    """Prefill or append attention of a batch of requests whose keys and values are concatenated in two tensors.

    `plan` takes the lengths and everything that decides which code runs; `run` takes the tensors, any number of times
    (once per layer). Formulas: `single_prefill_with_kv_cache`.

    Parameters
    ----------
    float_workspace_buffer, backend : as for `BatchPrefillWithPagedKVCacheWrapper`.
    kv_layout : "NHD" (default) or "HND", of k and v.
    use_cuda_graph : default False. True keeps addresses and launches across plans, as for
        `BatchPrefillWithPagedKVCacheWrapper`; the first plan also sets the upper bound of keys (`kv_indptr[-1]`).
    qo_indptr_buf, kv_indptr_buf : int32 `[batch_size + 1]`. Required with `use_cuda_graph`, otherwise not used.
    custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs, variant_owns_mask : as for
        `BatchPrefillWithPagedKVCacheWrapper`.

    Raises
    ------
    The errors of `BatchPrefillWithPagedKVCacheWrapper`.
    """

    kv_source = "ragged"
    older_order = "return_lse"

    @accepts_older_names
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        self._sink_variant = sink_variant.from_jit(jit_args, jit_kwargs, variant_owns_mask)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        masks = {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
        self._set_graph_buffers(qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf, **masks)

    @makes_plan
    @accepts_older_names
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
        *,
        lse_base: str = "log2",
    ) -> PlanRequest:
        """Schedule a batch: request i has the query tokens `qo_indptr[i]:qo_indptr[i + 1]` and the keys
        `kv_indptr[i]:kv_indptr[i + 1]`.

        Index arrays are int32 or int64, on the GPU or the CPU, as for `BatchPrefillWithPagedKVCacheWrapper.plan`: no
        plan waits for the GPU. With arrays there, the first run also tells the rows of k.

        Parameters
        ----------
        qo_indptr, kv_indptr : `[batch_size + 1]`, not decreasing.
        num_qo_heads, num_kv_heads, head_dim_qk (older name `head_dim`), head_dim_vo, custom_mask, packed_custom_mask,
            causal, pos_encoding_mode, use_fp16_qk_reduction (older name `allow_fp16_qk_reduction`), sm_scale,
            window_left, logits_soft_cap, rope_scale, rope_theta, q_data_type, kv_data_type, o_data_type, non_blocking,
            disable_split_kv, seq_lens, seq_lens_q, max_token_per_sequence, max_sequence_kv, lse_base : as for
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr : multi-item scoring, as there
            (FlashInfer's ragged wrapper ignores them).
        fixed_split_size : as there, but in tokens per split of the keys.
        v_indptr, o_indptr : refused unless None: v is indexed like k, and out like q.
        uniform_q_len : with `use_cuda_graph` a promise that every request has that many query tokens, as there; None
            (default), 0 or less: no promise. It makes captured launches smaller, but is no reason for other kernels.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.plan`; NotSupported also for `v_indptr` and `o_indptr`. After
        an error the previous plan is still in force.
        """
        checks.refuse_given("v is indexed like k, and out like q", off=None, v_indptr=v_indptr, o_indptr=o_indptr)
        return prefill_request(self._place, locals(), NAMES, self._sink_variant)

    begin_forward = plan

    @declare.operator("ragged_prefill_run", fakes.attention)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str | None = None,
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Result:
        """Compute the attention of the planned batch.

        Parameters
        ----------
        q, args, q_scale, k_scale, v_scale, out, lse, return_lse, lse_base, lse_layout, enable_pdl, sinks : as for
            `BatchPrefillWithPagedKVCacheWrapper.run`.
        k, v : `[kv_indptr[-1], num_kv_heads, head_dim]` ("NHD") or `[num_kv_heads, kv_indptr[-1], head_dim]` ("HND") of
            the planned dtype; more rows may follow. Strides and alignment as of a paged cache. v of a request's tokens
            must be finite even where hidden from all queries: NaN may reach every row of the request and kv head.
        o_scale : number > 0 that `out` is divided by, the scale of an fp8 output. Default 1.
        kv_cache_sf : (k_sf, v_sf) for NVFP4 (uint8) k and v, `[..., head_dim / 16]`, as for that `run`.

        Returns
        -------
        As `BatchPrefillWithPagedKVCacheWrapper.run`.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        if is_dynamo_compiling():
            return trace.operator("ragged_prefill_run")(locals())
        head_scales = args or None
        if self._sink_variant is not None:
            planned_scale = self._in_force().settings.sm_scale
            sinks, q_scale = self._sink_variant.operands(args, planned_scale, sinks, q_scale)
            head_scales = None
        if o_scale is not None:
            v_scale = operands.scaled("v_scale", v_scale, 1.0 / checks.positive("o_scale", o_scale))
        arguments = run_arguments((
            q, (k, v), q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, None, sinks, kv_cache_sf,
            head_scales, None,
        ))  # fmt: skip
        if lse_base is not None or not isinstance(lse_layout, str) or lse_layout != "NH":
            return self._run(arguments, (lse_base, lse_layout))
        return self._run(arguments)

    run_return_lse = with_return_lse(run)

    @declare.operator("ragged_prefill_forward", fakes.attention)
    @older_form
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
            return trace.operator("ragged_prefill_forward")(locals())
        return self._forward(locals())

    forward_return_lse = with_return_lse(forward)
