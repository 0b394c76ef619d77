"""Names, arguments and defaults of FlashInfer 0.7.2 that have to do with attention, by module, as facts of its API."""

from __future__ import annotations

_SPARSE_OPTIONS = (
    "pos_encoding_mode='NONE' use_fp16_qk_reduction=False logits_soft_cap=None sm_scale=None rope_scale=None "
    "rope_theta=None"
)
_PAGES = "paged_kv_cache kv_cache_sf"
_TABLE = "kv_indices kv_indptr kv_last_page_len"
_BUFFERS = (
    "qo_indptr_buf=None paged_kv_indptr_buf=None paged_kv_indices_buf=None paged_kv_last_page_len_buf=None "
    "custom_mask_buf=None mask_indptr_buf=None"
)
_HEADS = "num_qo_heads num_kv_heads head_dim"

SIGNATURES = {
    "attention:BatchAttention": "kv_layout='NHD' device='cuda'",
    "attention:BatchAttention.plan": "qo_indptr kv_indptr kv_indices kv_len_arr num_qo_heads num_kv_heads head_dim_qk "
    "head_dim_vo page_size causal=False sm_scale=None logits_soft_cap=None q_data_type=torch.bfloat16 "
    "kv_data_type=torch.bfloat16 use_profiler=False",
    "attention:BatchAttention.run": "q kv_cache out=None lse=None k_scale=None v_scale=None logits_soft_cap=0.0 "
    "profiler_buffer=None kv_cache_sf=None",
    "attention:BatchAttention.prewarm_paged_kv_stride_variant": "variant='independent'",
    "attention:BatchAttentionWithAttentionSinkWrapper": "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False "
    f"{_BUFFERS} backend='auto' pos_encoding_mode='NONE' use_fp16_qk_reduction=False q_data_type=torch.bfloat16 "
    "kv_data_type=torch.bfloat16 head_dim_qk=128 head_dim_vo=128 window_left=-1",
    "cascade:BatchDecodeWithSharedPrefixPagedKVCacheWrapper": "float_workspace_buffer kv_layout='NHD'",
    "cascade:BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward": "unique_kv_indptr unique_kv_indices "
    f"unique_kv_last_page_len {_HEADS} page_size data_type='float16'",
    "cascade:BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward": "q k_shared v_shared unique_kv_cache",
    "cascade:BatchPrefillWithSharedPrefixPagedKVCacheWrapper": "float_workspace_buffer kv_layout='NHD'",
    "cascade:BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward": "qo_indptr paged_kv_indptr "
    f"paged_kv_indices paged_kv_last_page_len {_HEADS} page_size",
    "cascade:BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward": "q k_shared v_shared unique_kv_cache "
    "causal=False use_fp16_qk_reduction=False sm_scale=None rope_scale=None rope_theta=None",
    "cascade:BatchPrefillWithSharedPrefixPagedKVCacheWrapper.prewarm_paged_kv_stride_variant": "variant='independent'",
    "cascade:MultiLevelCascadeAttentionWrapper": "num_levels float_workspace_buffer kv_layout='NHD' "
    "use_cuda_graph=False qo_indptr_buf_arr=None paged_kv_indptr_buf_arr=None paged_kv_indices_buf_arr=None "
    "paged_kv_last_page_len_buf_arr=None",
    "cascade:MultiLevelCascadeAttentionWrapper.plan": "qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr "
    f"paged_kv_last_page_len {_HEADS} page_size causal=False pos_encoding_mode='NONE' use_fp16_qk_reduction=False "
    "sm_scale=None window_left=-1 logits_soft_cap=None rope_scale=None rope_theta=None q_data_type='float16' "
    "kv_data_type=None",
    "cascade:MultiLevelCascadeAttentionWrapper.run": "q paged_kv_cache",
    "cascade:MultiLevelCascadeAttentionWrapper.prewarm_paged_kv_stride_variant": "variant='independent'",
    "cascade:merge_state": "v_a s_a v_b s_b",
    "cascade:merge_state_in_place": "v s v_other s_other mask=None",
    "cascade:merge_states": "v s",
    "sparse:convert_bsr_mask_layout": "mask indptr",
    "sparse:BlockSparseAttentionWrapper": "float_workspace_buffer backend='auto'",
    "sparse:BlockSparseAttentionWrapper.plan": f"indptr indices M N R C {_HEADS} mask=None packed_mask=None "
    f"causal=False {_SPARSE_OPTIONS} q_data_type='float16' kv_data_type=None o_data_type='float16' non_blocking=True "
    "block_mask=None kv_block_lens=None q2k_indices=None q2k_num=None kv_splits=None use_clc=None q_scale=None "
    "k_scale=None v_scale=None",
    "sparse:BlockSparseAttentionWrapper.run": "q k v scale_q=None scale_k=None scale_v=None out=None lse=None "
    "return_lse=False enable_pdl=None",
    "sparse:BlockSparseAttentionWrapper.forward": f"q k v scale_q=None scale_k=None scale_v=None {_SPARSE_OPTIONS}",
    "sparse:VariableBlockSparseAttentionWrapper": "float_workspace_buffer backend='auto'",
    "sparse:VariableBlockSparseAttentionWrapper.plan": f"block_mask_map block_row_sz block_col_sz {_HEADS} "
    f"causal=False {_SPARSE_OPTIONS} non_blocking=True q_data_type='float16' kv_data_type=None",
    "sparse:VariableBlockSparseAttentionWrapper.run": "q k v out=None lse=None return_lse=False enable_pdl=None",
    "sparse:VariableBlockSparseAttentionWrapper.forward": f"q k v {_SPARSE_OPTIONS}",
    "page:append_paged_kv_cache": f"append_key append_value batch_indices positions paged_kv_cache {_TABLE} "
    "kv_layout='NHD'",
    "page:get_batch_indices_positions": "append_indptr seq_lens nnz batch_indices=None positions=None",
    "page:get_seq_lens": "kv_indptr kv_last_page_len page_size",
    "page:nvfp4_quantize_append_paged_kv_cache": f"append_key append_value batch_indices positions {_PAGES} {_TABLE} "
    "k_scale v_scale kv_layout='NHD'",
    "page:nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": f"append_key append_value slot_mapping {_PAGES} "
    "k_scale v_scale kv_layout='NHD'",
    "quantization:packbits": "x bitorder='big'",
    "quantization:segment_packbits": "x indptr bitorder='big'",
    "quantization:nvfp4_kv_quantize": "input global_scale",
    "quantization:nvfp4_kv_dequantize": "fp4_data block_scales global_scale output_dtype=torch.bfloat16",
    "quantization:nvfp4_kv_dequantize_paged": f"{_PAGES} block_tables seq_lens k_scale v_scale output_k output_v "
    "kv_layout='NHD'",
    "quantization:nvfp4_quantize_paged_kv_cache": "k_cache v_cache kv_layout='HND' k_global_sf=None v_global_sf=None",
}

REFUSED = ("attention:BatchPrefillWithCausalBidirectionalRangesWrapper",)

ABSENT = (  # multi-head latent attention
    "page:append_paged_mla_kv_cache",
    "page:nvfp4_quantize_append_paged_mla_kv_cache",
)
