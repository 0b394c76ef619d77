"""Dense latent attention under FlashMLA's names: `get_mla_metadata` and `flash_mla_with_kvcache`."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.mla import SPARSE
from cute_attn.request import checks
from cute_attn.request.mla import (
    GROUP,
    LATENT,
    NARROW,
    ROPE,
    MlaCall,
    MlaLengths,
    MlaOptions,
    Names,
    Part,
    Parts,
    split_rows,
)
from cute_attn.wrappers import mla as calls
from cute_attn.wrappers.mla_plan import refuse_dims

__all__ = ["SchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


NAMES = Names("", "", "block_table", "cache_seqlens")
QUERY_AXES = "[batch_size, q_len, num_heads, 576 or 512]"
CACHE_AXES = "[num_pages, page_size, 1, 576], or 512 without rotated columns"
# Bytes of a row of an 8-bit cache: latent e4m3 numbers, fp32 scales of their groups, rotated bfloat16 numbers.
SCALES_AT, ROPE_AT, ROW_BYTES = LATENT, LATENT + 4 * LATENT // GROUP, LATENT + 4 * LATENT // GROUP + 2 * ROPE


class SchedMeta:
    """What FlashMLA keeps of a schedule. Launches here share the keys among themselves: there is nothing to keep."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[SchedMeta, None]:
    """Return what `flash_mla_with_kvcache` takes as its schedule. Arguments, of older forms, are not read."""
    return SchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute latent attention of the newest tokens of every request, as `trtllm_batch_decode_with_kv_cache_mla` does.

    Parameters
    ----------
    q : `[batch_size, q_len, num_heads, 576]`, or 512 without rotated columns; float16 or bfloat16.
    k_cache : `[num_pages, page_size, 1, 576]` (or 512) of q's dtype; any page size. With is_fp8_kvcache `[num_pages,
        page_size, 1, 656]` of one byte each (uint8, int8 or float8_e4m3fn): 512 e4m3 numbers, four float32 scales,
        one for each 128 of them, and 64 bfloat16 numbers; q must be bfloat16.
    block_table : int32 `[batch_size, max_pages]`.
    cache_seqlens : int32 `[batch_size]`, keys of each request in tokens, those of the query tokens included.
    head_dim_v : 512; others are refused.
    tile_scheduler_metadata, num_splits : not read, whatever they are.
    softmax_scale : any finite number. Default 1 / sqrt(columns of q).
    causal : True: query token r of a request sees keys j <= r + seq_len - q_len. False (default): all keys.
    is_fp8_kvcache : rows of the cache have 656 bytes. Default False.
    indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length : refused unless None.

    Returns
    -------
    (out, lse) : `[batch_size, q_len, num_heads, 512]` of q's dtype, and the **natural** lse, float32 `[batch_size,
    num_heads, q_len]`. A row that sees no key has out 0 and lse -inf.

    Raises
    ------
    ArgumentError (a ValueError), ArgumentTypeError (a TypeError), NotSupported (a NotImplementedError: all that is
    refused above).

    Examples
    --------
    >>> q, cache = torch.randn(2, 1, 16, 576).half(), torch.randn(3, 64, 1, 576).half()
    >>> table, lengths = torch.tensor([[2], [0]], dtype=torch.int32), torch.tensor([40, 7], dtype=torch.int32)
    >>> out, lse = flash_mla_with_kvcache(q, cache, table, lengths, 512, *get_mla_metadata())
    >>> out.shape, lse.shape
    (torch.Size([2, 1, 16, 512]), torch.Size([2, 16, 1]))
    """
    for name, value in (
        *(("indices", indices), ("topk_length", topk_length), ("extra_k_cache", extra_k_cache)),
        *(("extra_indices_in_kvcache", extra_indices_in_kvcache), ("extra_topk_length", extra_topk_length)),
    ):
        if value is not None:
            checks.refuse(f"sparse MLA ({name})", *SPARSE)
    if attn_sink is not None:
        instead = "sinks of trtllm_batch_decode_with_kv_cache_mla"
        checks.refuse("attn_sink", "lse would have to leave out what out has", instead)
    rope = 0 if isinstance(q, torch.Tensor) and q.shape[-1:] == (LATENT,) else ROPE
    refuse_dims(("head_dim_v", "rotated columns"), (checks.integer("head_dim_v", head_dim_v), rope))
    queries = split_rows("q", q, (4,), QUERY_AXES, rope)
    narrow = checks.boolean("is_fp8_kvcache", is_fp8_kvcache)
    cache = _byte_rows(k_cache) if narrow else split_rows("k_cache", k_cache, (4,), CACHE_AXES, rope)
    if k_cache.shape[2] != 1:
        raise ArgumentError(f"k_cache must have shape {CACHE_AXES}, got {checks.describe(k_cache)}")
    scale = checks.real_or("softmax_scale", softmax_scale, (LATENT + rope) ** -0.5)
    workspace = Part("the workspace", q.new_empty(0, dtype=torch.uint8))  # launches take memory of their own
    groups = cache[2].x[:, :, 0] if narrow else None
    read = block_table, cache_seqlens, None, None
    call = MlaCall(q, None, cache[0].x, cache[1].x, groups, None, None, workspace, read, scale, 1.0)
    repeatable, found = calls.repeated(call, (causal,), ("FlashMLA",))
    if found is None:
        parts = Parts(
            *(part._replace(x=part.x.flatten(0, 1)) for part in queries),
            *(part._replace(x=part.x[:, :, 0]) for part in cache),
        )
        lengths = MlaLengths.checked(NAMES, (None, None, block_table, cache_seqlens), q.shape[1], q.device)
        lengths.check_rows("q", q)
        options = MlaOptions(causal, return_lse=True, lse_base="ln")
        found = calls.run(parts, lengths.on(q.device), call, options, "auto", repeatable)
    out, lse = found
    return out, lse.unflatten(0, q.shape[:2]).transpose(1, 2)


def _byte_rows(k_cache: Any) -> tuple[Part, ...]:
    """Return latent and rotated columns and scales of a cache with rows of bytes."""
    name, x = "k_cache", checks.tensor("k_cache", k_cache)
    if x.dim() != 4 or x.shape[-1] != ROW_BYTES or x.dtype not in (torch.uint8, torch.int8, NARROW):
        raise ArgumentError(
            f"{name} must have shape [num_pages, page_size, 1, {ROW_BYTES}] and a dtype of one byte (uint8, int8 or "
            f"float8_e4m3fn) with is_fp8_kvcache, got {checks.describe(x)}"
        )
    latent, scales, rotated = x.split((SCALES_AT, ROPE_AT - SCALES_AT, ROW_BYTES - ROPE_AT), dim=-1)
    try:
        views = latent.view(NARROW), rotated.view(torch.bfloat16), scales.view(torch.float32)
    except RuntimeError as error:
        raise ArgumentError(f"{name} must have rows at multiples of 16 bytes, got strides {x.stride()}") from error
    return tuple(Part(name, view) for view in views)
