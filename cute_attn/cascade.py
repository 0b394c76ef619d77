"""Attention of batches that share prefixes (cascade attention), and the merging of attention states."""

from __future__ import annotations

from cute_attn.wrappers.cascade import MultiLevelCascadeAttentionWrapper
from cute_attn.wrappers.merge import merge_state, merge_state_in_place, merge_states
from cute_attn.wrappers.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
