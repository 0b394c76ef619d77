"""Attention over several GPUs, on torch.distributed: sharded decode, ring prefill and Ulysses.

Every function and class takes a process group (default: all ranks) and is called by all its ranks with arguments that
agree. Communication is torch.distributed's: NCCL between GPUs, gloo between CPU processes. No gradients are computed.
"""

from __future__ import annotations

from cute_attn.integrations.distributed.decode import ShardedBatchDecodeWithPagedKVCacheWrapper
from cute_attn.integrations.distributed.pages import shard_kv_lens, shard_positions
from cute_attn.integrations.distributed.ring import ring_prefill
from cute_attn.integrations.distributed.ulysses import heads_to_tokens, tokens_to_heads, ulysses_attention
from cute_attn.integrations.distributed.zigzag import shard_zigzag, unshard_zigzag, zigzag_positions

__all__ = [
    "ShardedBatchDecodeWithPagedKVCacheWrapper",
    "heads_to_tokens",
    "ring_prefill",
    "shard_kv_lens",
    "shard_positions",
    "shard_zigzag",
    "tokens_to_heads",
    "ulysses_attention",
    "unshard_zigzag",
    "zigzag_positions",
]
