"""Attention with sinks of a batch over a paged cache: `BatchAttentionWithAttentionSinkWrapper`."""

from __future__ import annotations

import torch

from cute_attn.request import checks, sink_variant
from cute_attn.wrappers.base import DType
from cute_attn.wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper


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
        checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
        checks.integer("window_left", window_left)
        variant = sink_variant.made_for(q_data_type, kv_data_type, head_dim_qk, head_dim_vo, pos_encoding_mode)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        self._sink_variant = variant
