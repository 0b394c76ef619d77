"""The names of `import cute_attn`."""

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
from cute_attn.concat_ops import concat_mla_k
from cute_attn.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from cute_attn.dispatch.explain import explain
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
from cute_attn.mla import (
    BatchMLAPagedAttentionWrapper,
    MLAPlanMetadata,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from cute_attn.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
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
    trtllm_ragged_attention_deepseek,
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

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArtifactError",
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "FP4Tensor",
    "Features",
    "LayoutError",
    "MLAPlanMetadata",
    "MultiLevelCascadeAttentionWrapper",
    "NotPlannedError",
    "NotSupported",
    "Refusal",
    "RuntimeArgumentError",
    "VariableBlockSparseAttentionWrapper",
    "WorkspaceError",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "concat_mla_k",
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
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]
