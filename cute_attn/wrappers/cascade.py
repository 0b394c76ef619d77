"""Attention of batches that share prefixes over levels of pages: `MultiLevelCascadeAttentionWrapper`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError, NotPlannedError, NotSupported, Refusal
from cute_attn.request import checks, index_arrays
from cute_attn.request.settings import POS_ENCODING_MODES
from cute_attn.wrappers.base import Cache, DType
from cute_attn.wrappers.engine_attributes import EngineHooks
from cute_attn.wrappers.merge import merge_state_in_place
from cute_attn.wrappers.not_copied import NotCopied
from cute_attn.wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from cute_attn.wrappers.signatures import accepts_older_names


class MultiLevelCascadeAttentionWrapper(EngineHooks, NotCopied):
    """Attention of a batch whose requests share prefixes. A shared page is read once for all queries that share it.

    Level 0 has the keys that most requests share, the last level those of single requests. In each level, groups of
    consecutive query tokens attend to the same pages. The keys of a query are those of its groups in all levels, in
    order. Each level is one run of a paged prefill wrapper; the results are merged as by `merge_state`:
    s = log2(sum of 2^s_i), v = sum of 2^(s_i - s) v_i.

    Parameters
    ----------
    num_levels : number of levels, at least 1.
    float_workspace_buffer, kv_layout, use_cuda_graph : as for `BatchPrefillWithPagedKVCacheWrapper`.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr : with
        `use_cuda_graph`, lists of that wrapper's buffers, one per level.

    Raises
    ------
    ArgumentTypeError (not an int, bool, tensor or list), ArgumentError (num_levels < 1; a list of another length;
    shape, dtype, device or alignment of a buffer), LayoutError (`kv_layout`).
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._num_levels = checks.at_least("num_levels", num_levels, 1)
        self._use_cuda_graph = checks.boolean("use_cuda_graph", use_cuda_graph)
        buffers = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        levels = [
            [None] * num_levels if arrays is None and not use_cuda_graph else self._levels(name, arrays)
            for name, arrays in buffers.items()
        ]
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *level)
            for level in zip(*levels, strict=True)
        ]
        self._ready = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph=True`."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Replace the workspace. There is no plan afterwards: call `plan` before the next `run`.

        Parameters
        ----------
        float_workspace_buffer : as for the constructor.
        int_workspace_buffers : a list with a tensor per level on the same device, not used: the levels' wrappers
            allocate the memory of their schedules.

        Raises
        ------
        ArgumentTypeError (not a tensor or list), ArgumentError (a list of another length, another device).
        """
        self._ready = False
        buffers = self._levels("int_workspace_buffers", int_workspace_buffers)
        for wrapper, buffer in zip(self._wrappers, buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)

    @accepts_older_names
    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Schedule all levels. After an error there is no plan.

        Parameters
        ----------
        qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len : lists with the arrays of
            `BatchPrefillWithPagedKVCacheWrapper.plan` per level, int32 or int64: `[groups + 1]`, `[groups + 1]`, page
            numbers, and `[groups]`. All levels have the same number of query tokens.
        num_qo_heads, num_kv_heads, head_dim, page_size : at least 1; num_qo_heads must be a multiple
            of num_kv_heads.
        causal : default False. Applies to the last level, whose keys end with the query tokens' own; the other levels
            are seen in full.
        pos_encoding_mode, window_left : with more than one level refused unless "NONE" and negative: they depend on
            positions, and a level knows only those within itself.
        use_fp16_qk_reduction (older name `allow_fp16_qk_reduction`) : a hint; scores are always accumulated in fp32.
        sm_scale : any finite number. Default `head_dim ** -0.5`.
        logits_soft_cap : soft cap of the logits; None (default), 0 or a negative number: none.
        rope_scale, rope_theta : > 0, default 1 and 1e4. Read under ROPE_LLAMA only.
        q_data_type, kv_data_type : torch dtypes or their names. Default float16, and q's.

        Raises
        ------
        ArgumentTypeError (not a list), ArgumentError (lists of another length, levels with different numbers of query
        tokens), NotSupported (positions), and the errors of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        self._ready = False
        self._refuse_positions(pos_encoding_mode, window_left)
        arrays = (
            self._levels("qo_indptr_arr", qo_indptr_arr),
            self._levels("paged_kv_indptr_arr", paged_kv_indptr_arr),
            self._levels("paged_kv_indices_arr", paged_kv_indices_arr),
            self._levels("paged_kv_last_page_len", paged_kv_last_page_len),
        )
        rows = [int(index_arrays.indptr(f"qo_indptr_arr[{i}]", indptr)[-1]) for i, indptr in enumerate(arrays[0])]
        if len(set(rows)) > 1:
            raise ArgumentError(f"qo_indptr_arr must end with the same number of query tokens everywhere, got {rows}")
        last = self._wrappers[-1]
        for wrapper, qo_indptr, indptr, indices, last_page_len in zip(self._wrappers, *arrays, strict=True):
            wrapper.plan(
                qo_indptr,
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal if wrapper is last else False,
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )
        self._ready = True

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: Cache) -> torch.Tensor:
        """Compute the attention of the planned batch over all levels.

        Parameters
        ----------
        q : `[qo_indptr[-1], num_qo_heads, head_dim]`.
        paged_kv_cache : as for `BatchPrefillWithPagedKVCacheWrapper.run`; all levels' pages are in it.

        Returns
        -------
        `[qo_indptr[-1], num_qo_heads, head_dim]` in q's dtype (bfloat16 for fp8 q).

        Raises
        ------
        NotPlannedError (no plan yet), and the errors of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        if not self._ready:
            raise NotPlannedError("MultiLevelCascadeAttentionWrapper.plan() must come before run()")
        *shared, last = self._wrappers
        v, s = last.run(q, paged_kv_cache, return_lse=True)
        for wrapper in shared:
            merge_state_in_place(v, s, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return v

    forward = run

    def end_forward(self) -> None:
        """Do nothing. Callers of FlashInfer's older `begin_forward` and `forward` end with it."""

    def _levels(self, name: str, arrays: Any) -> Sequence[Any]:
        if not isinstance(arrays, list | tuple):
            raise ArgumentTypeError(
                f"{name} must be a list with a tensor for each level, got {checks.describe(arrays)}"
            )
        if len(arrays) != self._num_levels:
            raise ArgumentError(f"{name} must have a tensor for each of {self._num_levels} levels, got {len(arrays)}")
        return arrays

    def _refuse_positions(self, pos_encoding_mode: Any, window_left: Any) -> None:
        checks.choice("pos_encoding_mode", pos_encoding_mode, POS_ENCODING_MODES)
        refusals = [
            Refusal("cascade", feature, "a level knows positions within itself only", "a paged wrapper over all pages")
            for feature, used in (
                (f"pos_encoding_mode={pos_encoding_mode!r}", pos_encoding_mode != "NONE"),
                (f"window_left={window_left!r}", checks.whole("window_left", window_left) >= 0),
            )
            if used
        ]
        if refusals and self._num_levels > 1:
            raise NotSupported(refusals)
