"""Calls of everything in FlashInfer's table that computes attention, each to be repeated with one argument changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.support.entry_points import ENTRIES, PREFIXES, Planned

Changes = dict[str, Any]
Results = tuple[torch.Tensor, ...]
Call = Callable[[str, Changes], Results]  # the method that the changes concern, and the changes

# ---- all calls

ENTRY_OF = {  # by the name of the function or class
    "single_decode_with_kv_cache": "single decode",
    "single_prefill_with_kv_cache": "single prefill",
    "BatchDecodeWithPagedKVCacheWrapper": "decode",
    "BatchPrefillWithPagedKVCacheWrapper": "paged",
    "BatchPrefillWithRaggedKVCacheWrapper": "ragged",
    "BatchAttentionWithAttentionSinkWrapper": "paged with sinks",
    "BatchPrefillWithCausalBidirectionalRangesWrapper": "paged with ranges",
    "BatchAttention": "mixed",
    "BlockSparseAttentionWrapper": "blocks",
    "VariableBlockSparseAttentionWrapper": "variable blocks",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": "shared prefix, decode",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": "shared prefix, prefill",
    "MultiLevelCascadeAttentionWrapper": "levels",
    "trtllm_batch_decode_with_kv_cache": "trtllm",
    "xqa_batch_decode_with_kv_cache": "xqa",
    "trtllm_batch_context_with_kv_cache": "trtllm context",
    "trtllm_fmha_v2_prefill": "trtllm fmha, pages",
    "trtllm_ragged_attention_deepseek": "trtllm ragged",
    "xqa": "xqa, low level",
    "trtllm_batch_decode_with_kv_cache_mla": "latent",
    "xqa_batch_decode_with_kv_cache_mla": "latent, xqa",
    "BatchMLAPagedAttentionWrapper": "latent, planned",
}
WITHOUT_LSE = ("mixed", *PREFIXES, "trtllm fmha, pages", "trtllm ragged", "xqa, low level", "latent, xqa")


def called(name: str, device: str, method: str, changes: Changes) -> Results:
    """Return new results of a call, lse too where it may be asked for."""
    entry = {**ENTRIES, **PREFIXES}[ENTRY_OF[name]]
    given = entry.on(device, ("out", "lse"))
    call = entry.begin(given, "auto", {method: changes})
    if method == "forward" and isinstance(call, Planned):
        call = call._replace(method="forward_return_lse" if hasattr(call.made, "forward_return_lse") else "forward")
    elif ENTRY_OF[name] not in WITHOUT_LSE:
        given["return_lse"] = True
    found = call({**given, **(changes if method in ("", "run", "forward") else {})})
    if found is None:
        found = given["output"]
    return found if isinstance(found, tuple) else (found,)


def calls(device: str) -> dict[str, Call]:
    """All of them by the name of the function or class."""
    return {name: functools.partial(called, name, device) for name in ENTRY_OF}
