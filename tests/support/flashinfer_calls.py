"""Calls of everything in FlashInfer's table that computes attention, each to be repeated with one argument changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import cute_attn
from tests.support import entry_points
from tests.support.entry_points import (
    DIM,
    ENTRIES,
    HEADS,
    INDICES,
    KV_HEADS,
    LAST_PAGE_LEN,
    PAGE,
    PAGE_INDPTR,
    PAGES,
    QO_INDPTR,
    ROWS,
    SIZES,
    UNCHANGED,
    WORKSPACE_BYTES,
    Entry,
    Planned,
    Tensors,
    ints,
    randn,
    without,
    zeros,
)

Changes = dict[str, Any]
Results = tuple[torch.Tensor, ...]
Call = Callable[[str, Changes], Results]  # the method that the changes concern, and the changes

# ---- wrappers of prefixes, which write new tensors only

HALVES = {"q": randn(ROWS, HEADS, DIM).half(), "the workspace": zeros(WORKSPACE_BYTES)}
HALF_PAGES = randn(PAGES, 2, PAGE, KV_HEADS, DIM).half()
SHARED = HALVES | {name: randn(7, KV_HEADS, DIM).half() for name in ("k_shared", "v_shared")}
SHARED |= {"unique_kv_cache": HALF_PAGES}
OWN_PAGES = ints(*PAGE_INDPTR), INDICES["kv_indices"], ints(*LAST_PAGE_LEN)


def shared(wrapper: Callable[..., Any], rows: int, *bounds: torch.Tensor) -> Entry:
    """Return the entry of a wrapper for requests with one shared prefix."""

    def begin(given: Tensors, _: str = "auto", changes: entry_points.Changes = UNCHANGED) -> entry_points.Call:
        made = wrapper(given["the workspace"], **changes.get("__init__", {}))
        made.begin_forward(*bounds, *OWN_PAGES, *SIZES, PAGE, **changes.get("begin_forward", {}))
        return lambda given: made.forward(**without(dict(given), "the workspace"))

    return Entry(SHARED | {"q": SHARED["q"][:rows]}, begin, ())


def begin_levels(given: Tensors, _: str = "auto", changes: entry_points.Changes = UNCHANGED) -> entry_points.Call:
    """Plan one level of a cascade, and return its runs."""
    made = cute_attn.MultiLevelCascadeAttentionWrapper(1, given["the workspace"], **changes.get("__init__", {}))
    made.plan(*([x] for x in (ints(*QO_INDPTR), *OWN_PAGES)), *SIZES, PAGE, **changes.get("plan", {}))
    return lambda given: made.run(**without(dict(given), "the workspace"))


PREFIXES = {
    "shared prefix, decode": shared(cute_attn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper, 2),
    "shared prefix, prefill": shared(cute_attn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper, ROWS, ints(*QO_INDPTR)),
    "levels": Entry(HALVES | {"paged_kv_cache": HALF_PAGES}, begin_levels, ()),
}

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
