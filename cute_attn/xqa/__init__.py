"""Decode over paged caches of 16, 8 and 4 bits (FlashInfer's XQA functions)."""

from cute_attn.xqa.decode import trtllm_batch_decode_with_kv_cache, xqa, xqa_batch_decode_with_kv_cache

__all__ = ["trtllm_batch_decode_with_kv_cache", "xqa", "xqa_batch_decode_with_kv_cache"]
