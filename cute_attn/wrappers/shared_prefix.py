"""Attention of batches with one prefix that all requests share, in tensors of its own: FlashInfer's older cascade."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.dispatch import backends
from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.problem import Problem
from cute_attn.request import single
from cute_attn.request.names import rename
from cute_attn.request.settings import Call
from cute_attn.wrappers.base import BatchWrapper, Cache, DType, Result
from cute_attn.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from cute_attn.wrappers.engine_attributes import EngineHooks
from cute_attn.wrappers.merge import merge_state_in_place
from cute_attn.wrappers.not_copied import NotCopied
from cute_attn.wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper

DECODE_PLAN_NAMES = {
    "indptr": "unique_kv_indptr",
    "indices": "unique_kv_indices",
    "last_page_len": "unique_kv_last_page_len",
    "head_dim_qk": "head_dim",
    "q_data_type": "data_type",
    "kv_data_type": "data_type",
}


class _SharedPrefixWrapper(NotCopied):
    """What the two wrappers share: the wrapper of the requests' own keys, and the merging of both results."""

    _wrapper: BatchWrapper
    _kv_layout: str

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replace the workspace. There is no plan afterwards: call `begin_forward` before the next `forward`.

        Parameters
        ----------
        float_workspace_buffer : as for the constructor.
        int_workspace_buffer : a tensor on the same device, not used.

        Raises
        ------
        ArgumentTypeError (not a tensor), ArgumentError (not contiguous, not 16-byte aligned, another device).
        """
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """Do nothing. Callers of FlashInfer's older `begin_forward` and `forward` end with it."""

    def _prefix(self, q: Any, k_shared: Any, v_shared: Any, sm_scale: Any) -> Problem:
        """Check the call over the prefix, which all query tokens see in full. Nothing is launched yet."""
        call = Call(q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True)
        try:
            return single.problem(call)
        except (ArgumentError, ArgumentTypeError) as error:
            rename(error, {"k": "k_shared", "v": "v_shared", "k and v": "k_shared and v_shared"})
            raise


def _merged(prefix: Problem, own: Result) -> torch.Tensor:
    """Run the call over the prefix and merge its result into that of the requests' own keys."""
    out, lse = own
    backends.run(prefix, "auto")
    assert prefix.lse is not None
    merge_state_in_place(out, lse, prefix.out, prefix.lse)
    return out


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode attention of a batch: one new token per request over a prefix that all requests share, in tensors of its
    own, and the request's keys in a paged cache. `MultiLevelCascadeAttentionWrapper` also takes prefixes in pages.

    The keys of a request are those of the prefix and its own, in this order; results over both are merged as by
    `merge_state`.

    Parameters
    ----------
    float_workspace_buffer : as for `BatchDecodeWithPagedKVCacheWrapper`.
    kv_layout : "NHD" (default) or "HND", of prefix and cache.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (not contiguous, not 16-byte aligned), LayoutError (`kv_layout`).
    """

    _wrapper: BatchDecodeWithPagedKVCacheWrapper

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = "float16",
    ) -> None:
        """Schedule a batch. `plan` is the same method.

        Parameters
        ----------
        unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len : the requests' own pages: `[batch_size + 1]`, page
            numbers, and `[batch_size]`, as for `BatchDecodeWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, head_dim, page_size : at least 1; num_qo_heads must be a multiple of num_kv_heads.
        data_type : of q, prefix and cache: a torch dtype or its name, default float16.

        Raises
        ------
        The errors of `BatchDecodeWithPagedKVCacheWrapper.plan`. After an error the previous plan is still in force.
        """
        pages = unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len
        try:
            self._wrapper.plan(*pages, num_qo_heads, num_kv_heads, head_dim, page_size, data_type=data_type)
        except (ArgumentError, ArgumentTypeError) as error:
            rename(error, DECODE_PLAN_NAMES)
            raise

    plan = begin_forward

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Cache
    ) -> torch.Tensor:
        """Compute the attention of the planned batch. `run` is the same method.

        Parameters
        ----------
        q : `[batch_size, num_qo_heads, head_dim]`.
        k_shared, v_shared : the prefix: `[prefix_len, num_kv_heads, head_dim]` ("NHD") or `[num_kv_heads, prefix_len,
            head_dim]` ("HND").
        unique_kv_cache : the cache with the requests' own pages, as for `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns
        -------
        `[batch_size, num_qo_heads, head_dim]` in q's dtype.

        Raises
        ------
        NotPlannedError (no plan yet), and the errors of `BatchDecodeWithPagedKVCacheWrapper.run` and
        `single_prefill_with_kv_cache`.
        """
        prefix = self._prefix(q, k_shared, v_shared, None)
        return _merged(prefix, self._wrapper.run(q, unique_kv_cache, return_lse=True))

    run = forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper, EngineHooks):
    """Prefill or append attention of a batch over a prefix that all requests share, in tensors of its own, and the
    requests' keys in a paged cache. `MultiLevelCascadeAttentionWrapper` also takes prefixes in pages.

    The keys of a request are those of the prefix and its own, in this order; results over both are merged as by
    `merge_state`.

    Parameters
    ----------
    float_workspace_buffer : as for `BatchPrefillWithPagedKVCacheWrapper`.
    kv_layout : "NHD" (default) or "HND", of prefix and cache.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (not contiguous, not 16-byte aligned), LayoutError (`kv_layout`).
    """

    _wrapper: BatchPrefillWithPagedKVCacheWrapper

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Schedule a batch. `plan` is the same method.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : query tokens and own pages of the
            requests: `[batch_size + 1]`, `[batch_size + 1]`, page numbers, and `[batch_size]`, as for
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, head_dim, page_size : at least 1; num_qo_heads must be a multiple of num_kv_heads.
        q_data_type, kv_data_type : torch dtypes or their names. Default float16, and q's.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.plan`. After an error the previous plan is still in force.
        """
        arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self._wrapper.plan(*arrays, *sizes, q_data_type=q_data_type, kv_data_type=kv_data_type)

    plan = begin_forward

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Compute the attention of the planned batch. `run` is the same method.

        Parameters
        ----------
        q : `[qo_indptr[-1], num_qo_heads, head_dim]`.
        k_shared, v_shared : the prefix: `[prefix_len, num_kv_heads, head_dim]` ("NHD") or `[num_kv_heads, prefix_len,
            head_dim]` ("HND").
        unique_kv_cache : the cache with the requests' own pages, as for `BatchPrefillWithPagedKVCacheWrapper.run`.
        causal : default False. Applies to the requests' own keys; the prefix is seen in full.
        use_fp16_qk_reduction : a hint; scores are always accumulated in fp32.
        sm_scale : any finite number. Default `head_dim ** -0.5`.
        rope_scale, rope_theta : > 0; without effect, as no position is encoded.

        Returns
        -------
        `[qo_indptr[-1], num_qo_heads, head_dim]` in q's dtype.

        Raises
        ------
        NotPlannedError (no plan yet), and the errors of `BatchPrefillWithPagedKVCacheWrapper.forward` and
        `single_prefill_with_kv_cache`.
        """
        prefix = self._prefix(q, k_shared, v_shared, sm_scale)
        own = self._wrapper.forward(
            q,
            unique_kv_cache,
            causal=causal,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            return_lse=True,
        )
        return _merged(prefix, own)

    run = forward
