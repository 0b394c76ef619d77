"""Batch attention wrappers of FlashInfer's module of this name."""

from __future__ import annotations

from cute_attn.wrappers.batch_attention import BatchAttention
from cute_attn.wrappers.bidirectional_ranges import BatchPrefillWithCausalBidirectionalRangesWrapper
from cute_attn.wrappers.paged_prefill import BatchAttentionWithAttentionSinkWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
]
