"""Dense latent attention under FlashMLA's names: `get_mla_metadata` and `flash_mla_with_kvcache`."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.mla import SPARSE
from cute_attn.request import checks
from cute_attn.request.mla import GROUP, LATENT, NARROW, ROPE, MlaCall, MlaLengths, split_rows
from cute_attn.wrappers import mla as calls
from cute_attn.wrappers.mla_plan import checked_dims

__all__ = ["SchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


NAMES = {
    **dict.fromkeys(("query", "q_nope", "q_pe"), "q"),
    **dict.fromkeys(("ckv_cache", "kpe_cache", "ckv_scale_arr"), "k_cache"),
    "kv_indices": "block_table",
    "kv_len_arr": "cache_seqlens",
}
QUERY_AXES = "[batch_size, q_len, num_heads, 576 or 512]"
CACHE_AXES = "[num_pages, page_size, 1, 576], or 512 without rotated columns"
# Bytes of a row of an 8-bit cache: latent e4m3 numbers, fp32 scales of their groups, rotated bfloat16 numbers.
SCALES_AT, ROPE_AT, ROW_BYTES = LATENT, LATENT + 4 * LATENT // GROUP, LATENT + 4 * LATENT // GROUP + 2 * ROPE
SPARSE_ARGUMENTS = "indices", "topk_length", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"


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
    given = locals()
    for name in SPARSE_ARGUMENTS:
        if given[name] is not None:
            checks.refuse(f"sparse MLA ({name})", *SPARSE)
    if attn_sink is not None:
        instead = "sinks of trtllm_batch_decode_with_kv_cache_mla"
        checks.refuse("attn_sink", "lse would have to leave out what out has", instead)
    rope = 0 if isinstance(q, torch.Tensor) and q.shape[-1:] == (LATENT,) else ROPE
    checked_dims(**{"head_dim_v": head_dim_v, "rotated columns": rope})
    q_nope, q_pe = split_rows("q", q, (4,), QUERY_AXES, rope)
    if checks.boolean("is_fp8_kvcache", is_fp8_kvcache):
        ckv, kpe, scales = _byte_rows(k_cache)
    else:
        (ckv, kpe), scales = split_rows("k_cache", k_cache, (4,), CACHE_AXES, rope), None
    if k_cache.shape[2] != 1:
        raise checks.wrong(f"k_cache must have shape {CACHE_AXES}", k_cache)
    scale = checks.real("softmax_scale", softmax_scale, (LATENT + rope) ** -0.5)
    workspace = q.new_empty(0, dtype=torch.uint8)  # launches take memory of their own
    read = block_table, cache_seqlens, None, None
    call = MlaCall(
        q, None, ckv, kpe, scales, None, None, workspace, read, scale, 1.0, None, causal, True, lse_base="ln"
    )
    repeatable, found = calls.repeated(call, (), ("FlashMLA",))
    if found is None:
        cache = (None if x is None else x[:, :, 0] for x in call[2:5])
        call = call.in_parts(q_nope.flatten(0, 1), q_pe.flatten(0, 1), *cache)
        with checks.renamed(NAMES):
            found = calls.run(call, MlaLengths.in_table(q, block_table, cache_seqlens), "auto", repeatable)
    out, lse = found
    return out, lse.unflatten(0, q.shape[:2]).transpose(1, 2)


def _byte_rows(k_cache: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return latent and rotated columns and scales of a cache with rows of bytes."""
    x = checks.tensor("k_cache", k_cache)
    if x.dim() != 4 or x.shape[-1] != ROW_BYTES or x.dtype not in (torch.uint8, torch.int8, NARROW):
        raise checks.wrong(
            f"k_cache must have shape [num_pages, page_size, 1, {ROW_BYTES}] and a dtype of one byte (uint8, int8 or "
            "float8_e4m3fn) with is_fp8_kvcache",
            x,
        )
    latent, scales, rotated = x.split((SCALES_AT, ROPE_AT - SCALES_AT, ROW_BYTES - ROPE_AT), dim=-1)
    try:
        return latent.view(NARROW), rotated.view(torch.bfloat16), scales.view(torch.float32)
    except RuntimeError as error:
        raise ArgumentError(f"k_cache must have rows at multiples of 16 bytes, got strides {x.stride()}") from error
