"""Prefill and append attention of a batch, whose keys and values are paged or ragged.

Argument for argument what `single_prefill_with_kv_cache` says, for every request of the batch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from cute_attn.request import batch_plan, batch_run, checks
from cute_attn.request.batch_plan import Mask, Options, Tokens
from cute_attn.request.batch_run import Plan
from cute_attn.wrappers.base import Asked, BatchWrapper, Result
from cute_attn.wrappers.legacy_args_batch import (
    PAGED_SEED,
    RAGGED_SEED,
    both_plan_spellings,
    paged_extras,
    ragged_extras,
    renaming,
)

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]
DType = torch.dtype | str
Scale = float | torch.Tensor

PAGED_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
JIT_REASON = "variants written in CUDA are not part of this library"
JIT_INSTEAD = "sinks, custom_mask, logits_soft_cap or pos_encoding_mode"


def refuse_jit(jit_args: Any, jit_kwargs: Any = None) -> None:
    batch_plan.refuse("jit_args", jit_args, JIT_REASON, JIT_INSTEAD)
    batch_plan.refuse("jit_kwargs", jit_kwargs, JIT_REASON, JIT_INSTEAD)


def refuse_multi_item(
    prefix_len_ptr: Any, token_pos_in_items_ptr: Any, token_pos_in_items_len: Any, max_item_len_ptr: Any
) -> None:
    for name, value in (
        ("prefix_len_ptr", prefix_len_ptr),
        ("token_pos_in_items_ptr", token_pos_in_items_ptr),
        ("token_pos_in_items_len", token_pos_in_items_len),
        ("max_item_len_ptr", max_item_len_ptr),
    ):
        batch_plan.refuse(f"{name} (multi-item scoring)", value, "it has no such mask", "the same mask as custom_mask")


class PrefillWrapper(BatchWrapper):
    """What the paged and the ragged wrapper share."""

    def _mask(self, custom_mask: Any, packed_custom_mask: Any, tokens: Tokens) -> Mask:
        if custom_mask is None and packed_custom_mask is None:
            return batch_plan.no_mask(tokens)
        return batch_plan.mask(custom_mask, packed_custom_mask, tokens, self.device)


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
    """Attention of a batch of requests whose keys and values lie in pages of a common cache.

    `plan` takes the lengths and everything that decides which code runs; `run` the tensors, any number of times (once
    a layer). Constructor arguments:

    Parameters
    ----------
    float_workspace_buffer : contiguous, any dtype, 16-byte aligned; 128 MB do for every batch, but with
        `fixed_split_size` (`workspace_size` tells). Holds partial results where keys are split. Wrappers that run one
        after the other may share it. Its device is the wrapper's.
    kv_layout : "NHD" or "HND", of the cache.
    use_cuda_graph : keep addresses and launches over plans, so that a captured `run` may be replayed after `plan` with
        other lengths. Batch size, options, dtypes and `qo_indptr[0]` stay those of the first plan, which also sets the
        most query tokens (`qo_indptr[-1]`).
    qo_indptr_buf, paged_kv_indptr_buf : with `use_cuda_graph`, int32 `[batch_size + 1]`.
    paged_kv_indices_buf : with `use_cuda_graph`, int32, as many elements as any plan may have pages.
    paged_kv_last_page_len_buf : with `use_cuda_graph`, int32 `[batch_size]`.
    custom_mask_buf, mask_indptr_buf (older name `qk_indptr_buf`) : with `use_cuda_graph` and custom masks, uint8 with
        room for the packed bits, and int32 `[batch_size + 1]`, which gets their byte offsets.
    backend : "auto", or the name of one; `cute_attn.explain` tells which takes what. Where a run brings features that
        the planned backend refuses (an expanded cache), "auto" plans again for one that takes them; a named backend
        and a CUDA graph raise NotSupported.
    jit_args, jit_kwargs : refused unless None.
    """

    kv_source = "paged"

    @renaming
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
    ) -> None:
        refuse_jit(jit_args, jit_kwargs)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr_buf, paged_kv_indptr_buf
        self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = paged_kv_indices_buf, paged_kv_last_page_len_buf
        self._take_buffers(
            {
                "qo_indptr_buf": (qo_indptr_buf, 1),
                "paged_kv_indptr_buf": (paged_kv_indptr_buf, 1),
                "paged_kv_indices_buf": (paged_kv_indices_buf, None),
                "paged_kv_last_page_len_buf": (paged_kv_last_page_len_buf, 0),
            }
        )
        self._take_mask_buffers(custom_mask_buf, mask_indptr_buf)

    @both_plan_spellings(common=8, seed=PAGED_SEED)
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
        *,
        lse_base: str = "log2",
    ) -> None:
        """Make the schedule of a batch. Request i has the query tokens `qo_indptr[i]:qo_indptr[i + 1]`.

        Index arrays are int32 or int64 and may lie on the CPU, from where they cost no synchronisation. The arguments
        after `page_size` may also follow, by position, the order of older FlashInfer releases (`custom_mask,
        packed_custom_mask, causal, ...`). Where an argument is not named here, `single_prefill_with_kv_cache` is.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr : `[batch_size + 1]`, not decreasing.
        paged_kv_indices : page numbers; those of request i at `paged_kv_indptr[i]:paged_kv_indptr[i + 1]`. An int32
            tensor on the wrapper's device is not copied: it must stay as it is until the last run.
        paged_kv_last_page_len : `[batch_size]`, within 1..page_size; without effect for a request of no pages, whose
            kv_len is 0.
        num_qo_heads, num_kv_heads, head_dim_qk (older name `head_dim`), page_size : at least 1.
        head_dim_vo : default `head_dim_qk`.
        custom_mask : bool, the `[qo_len, kv_len]` masks of all requests, flattened and concatenated. Takes the place of
            `causal`; `window_left` still applies.
        packed_custom_mask : the same as uint8 bits in **little** order. Either every request starts at a byte of its
            own (`segment_packbits(..., bitorder="little")`), or all bits follow one another (`packbits`): the number of
            bytes tells, and where both would have as many, the former is meant. Takes the place of `custom_mask`.
        use_fp16_qk_reduction (older name `allow_fp16_qk_reduction`) : a hint; sums are fp32 always.
        q_data_type, kv_data_type, o_data_type : torch dtypes or their names. Default of the last two: q's (for the
            output of fp8 q bfloat16). A uint8 cache is NVFP4 and needs `kv_cache_sf` in `run`.
        non_blocking : a hint; copies are ordered on the current stream either way.
        seq_lens, seq_lens_q : lengths once more; on the CPU they are checked against the index arrays.
        max_token_per_sequence, max_sequence_kv : bounds of the lengths of queries and keys; checked.
        block_tables : the pages once more; not read.
        prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr : refused unless None or 0.
        fixed_split_size : pages of a split. Then a request's bits do not depend on the rest of the batch.
        disable_split_kv : one split for every query tile. The same promise.
        lse_base : "log2" (FlashInfer's) or "ln".

        Raises
        ------
        ArgumentError (a ValueError), ArgumentTypeError (a TypeError), LayoutError (a KeyError), NotSupported (a
        NotImplementedError). After an error the plan before is still in force.
        """
        refuse_multi_item(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
        checks.boolean("non_blocking", non_blocking)
        page_size = batch_plan.page_size(page_size)
        q_bounds = batch_plan.indptr("qo_indptr", qo_indptr)
        tokens = batch_plan.paged(
            q_bounds, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, PAGED_NAMES
        )
        batch_plan.check_known(tokens, seq_lens, seq_lens_q, max_token_per_sequence, max_sequence_kv)
        if block_tables is not None:
            checks.tensor("block_tables", block_tables)
        options = Options(
            *(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
            *(q_data_type, kv_data_type, o_data_type, pos_encoding_mode, causal, window_left),
            *(logits_soft_cap, sm_scale, rope_scale, rope_theta, lse_base),
        )
        splits = batch_plan.splits(fixed_split_size, disable_split_kv, page_size)
        mask = self._mask(custom_mask, packed_custom_mask, tokens)
        self._make_plan(Asked(options, tokens, mask, splits, page_size))

    begin_forward = plan

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
        kv_cache_sf: Cache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Attention of the planned batch.

        Parameters
        ----------
        q : `[qo_indptr[-1], num_qo_heads, head_dim_qk]`. Rows before `qo_indptr[0]` get out 0 and lse -inf, in `out`
            and `lse` of the caller what they had.
        paged_kv_cache : a pair (k, v) of `[pages, page_size, num_kv_heads, head_dim]` ("NHD") or
            `[pages, num_kv_heads, page_size, head_dim]` ("HND"), or one tensor with an axis of 2 after the first. Any
            strides with unit stride on the last axis. With a page size of 1 the page axis may be missing.
        args : the seed's `k_scale, v_scale, return_lse`, or `scale_q, scale_k, scale_v` of fp8 attention, which have a
            number a head.
        q_scale, k_scale, v_scale : numbers, or one-element tensors; a tensor on the GPU is read by the kernel.
        out, lse : written instead of new tensors.
        return_lse : return `(out, lse)`.
        enable_pdl : False: no programmatic dependent launch.
        window_left : None, or the planned one.
        sinks : floating-point `[num_qo_heads]`: one more term of each softmax denominator.
        kv_cache_sf : (k_sf, v_sf) of an NVFP4 cache: e4m3, shaped like the cache with `head_dim / 16`.
        skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress : refused unless None or False.
        """
        if not (skip_softmax_threshold_scale_factor is use_fp16_softmax is uses_spcompress is None):
            for name, value in (
                ("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor),
                ("use_fp16_softmax", use_fp16_softmax),
                ("uses_spcompress", uses_spcompress),
            ):
                batch_plan.refuse(name, value, "softmax is exact and in fp32", f"{name}=None")
        head_scales = None
        if args:
            k_scale, v_scale, return_lse, head_scales = paged_extras(args, k_scale, v_scale, return_lse)
        return self._run(
            (q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks,
             kv_cache_sf, head_scales)
        )  # fmt: skip

    run_return_lse = functools.partialmethod(run, return_lse=True)

    @renaming
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
    ) -> Result:
        """Older form of `run`. Its options, given or by default, take the place of the planned ones, for this run and
        those after it: `plan(causal=True)` and then `forward(q, cache)` is not causal.
        """
        checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
        self._plan_again(
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Attention of a batch of requests whose keys and values follow one another in two tensors.

    Constructor arguments are those of `BatchPrefillWithPagedKVCacheWrapper`; the index buffers of `use_cuda_graph` are
    `qo_indptr_buf` and `kv_indptr_buf`, and the first plan also sets the most keys (`kv_indptr[-1]`).
    """

    kv_source = "ragged"

    @renaming
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
    ) -> None:
        refuse_jit(jit_args, jit_kwargs)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        self._take_buffers({"qo_indptr_buf": (qo_indptr_buf, 1), "kv_indptr_buf": (kv_indptr_buf, 1)})
        self._take_mask_buffers(custom_mask_buf, mask_indptr_buf)

    @both_plan_spellings(common=5, seed=RAGGED_SEED)
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
        *,
        lse_base: str = "log2",
    ) -> None:
        """Make the schedule of a batch: request i has the query tokens `qo_indptr[i]:qo_indptr[i + 1]` and the keys
        `kv_indptr[i]:kv_indptr[i + 1]`. All else is as in `BatchPrefillWithPagedKVCacheWrapper.plan`, but for the order
        `window_left, logits_soft_cap, sm_scale`; `fixed_split_size` counts tokens; `v_indptr` and `o_indptr` are
        refused unless None: v lies like k, and out like q.
        """
        refuse_multi_item(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        for name, value in (("v_indptr", v_indptr), ("o_indptr", o_indptr)):
            batch_plan.refuse(name, value, "v lies like k, and out like q", f"{name}=None")
        checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
        checks.boolean("non_blocking", non_blocking)
        tokens = batch_plan.ragged(qo_indptr, kv_indptr)
        batch_plan.check_known(tokens, seq_lens, seq_lens_q, max_token_per_sequence, max_sequence_kv)
        options = Options(
            *(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
            *(q_data_type, kv_data_type, o_data_type, pos_encoding_mode, causal, window_left),
            *(logits_soft_cap, sm_scale, rope_scale, rope_theta, lse_base),
        )
        splits = batch_plan.splits(fixed_split_size, disable_split_kv, 1)
        mask = self._mask(custom_mask, packed_custom_mask, tokens)
        self._make_plan(Asked(options, tokens, mask, splits, 1))

    begin_forward = plan

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
        enable_pdl: bool | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Result:
        """Attention of the planned batch. Arguments as in `BatchPrefillWithPagedKVCacheWrapper.run`, but for:

        Parameters
        ----------
        k, v : `[kv_indptr[-1], num_kv_heads, head_dim]` ("NHD") or `[num_kv_heads, kv_indptr[-1], head_dim]` ("HND");
            more rows may follow.
        args : the seed's `return_lse`, or `scale_q, scale_k, scale_v` of fp8 attention.
        o_scale : what `out` is divided by, a number: the scale of an fp8 output.
        """
        head_scales = None
        if args:
            return_lse, head_scales = ragged_extras(args, return_lse)
        if o_scale is not None:
            v_scale = batch_run.divided_by("o_scale", o_scale, v_scale)
        return self._run(
            (q, (k, v), q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, None, sinks, kv_cache_sf,
             head_scales)
        )  # fmt: skip

    def _keys_and_values(self, plan: Plan, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = cache
        return checks.tensor("k", k), checks.tensor("v", v)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    @renaming
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
    ) -> Result:
        """Older form of `run`. Its options, given or by default, take the place of the planned ones, for this run and
        those after it.
        """
        checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
        self._plan_again(
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
