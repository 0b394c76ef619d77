"""Attention kernels in CuTe DSL for NVIDIA GPUs, with FlashInfer's attention API.

Everything that users call is here; `cute_attn.prefill`, `.decode`, `.attention`, `.cascade`, `.sparse`, `.page`,
`.quantization` and `.utils` hold it under the names of FlashInfer's modules. CPU tensors run the same calls on a torch
reference.
"""

try:
    from cute_attn.attention import (
        BatchAttention,
        BatchAttentionWithAttentionSinkWrapper,
        BatchPrefillWithCausalBidirectionalRangesWrapper,
    )
    from cute_attn.cascade import (
        BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
        BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
        MultiLevelCascadeAttentionWrapper,
        merge_state,
        merge_state_in_place,
        merge_states,
    )
    from cute_attn.decode import (
        BatchDecodeWithPagedKVCacheWrapper,
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
        fast_decode_plan,
        single_decode_with_kv_cache,
    )
    from cute_attn.dispatch.select import explain
    from cute_attn.errors import (
        ArgumentError,
        ArgumentTypeError,
        ArtifactError,
        LayoutError,
        NotPlannedError,
        NotSupported,
        Refusal,
        RuntimeArgumentError,
        WorkspaceError,
    )
    from cute_attn.page import (
        append_paged_kv_cache,
        get_batch_indices_positions,
        get_seq_lens,
        nvfp4_quantize_append_paged_kv_cache,
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    )
    from cute_attn.prefill import (
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
        fast_prefill_plan,
        single_prefill_with_kv_cache,
        single_prefill_with_kv_cache_return_lse,
        trtllm_batch_context_with_kv_cache,
        trtllm_fmha_v2_prefill,
    )
    from cute_attn.problem import Features
    from cute_attn.quantization import (
        fp8_quantize_paged_kv_cache,
        nvfp4_kv_dequantize,
        nvfp4_kv_dequantize_paged,
        nvfp4_kv_quantize,
        nvfp4_quantize_paged_kv_cache,
        packbits,
        segment_packbits,
    )
    from cute_attn.sparse import (
        BlockSparseAttentionWrapper,
        VariableBlockSparseAttentionWrapper,
        convert_bsr_mask_layout,
    )
    from cute_attn.utils import (
        FP4Tensor,
        get_device_sm_count,
        get_trtllm_gen_multi_ctas_kv_counter_bytes,
    )
    from cute_attn.xqa import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
except ImportError as error:
    # Without torch there is no API, but `python -m cute_attn doctor` must run to say so, and artifacts are plain data.
    _import_error = error

    def __getattr__(name: str) -> None:
        if name in __all__:
            raise ImportError(f"cute_attn.{name} is not available: {_import_error}") from _import_error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArtifactError",
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "FP4Tensor",
    "Features",
    "LayoutError",
    "MultiLevelCascadeAttentionWrapper",
    "NotPlannedError",
    "NotSupported",
    "Refusal",
    "RuntimeArgumentError",
    "VariableBlockSparseAttentionWrapper",
    "WorkspaceError",
    "append_paged_kv_cache",
    "convert_bsr_mask_layout",
    "explain",
    "fast_decode_plan",
    "fast_prefill_plan",
    "fp8_quantize_paged_kv_cache",
    "get_batch_indices_positions",
    "get_device_sm_count",
    "get_seq_lens",
    "get_trtllm_gen_multi_ctas_kv_counter_bytes",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_paged_kv_cache",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "xqa_batch_decode_with_kv_cache",
]
