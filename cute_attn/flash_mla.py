"""Dense latent attention under FlashMLA's names: `get_mla_metadata` and `flash_mla_with_kvcache`."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.mla import SPARSE
from cute_attn.request import checks, trtllm_options
from cute_attn.request.mla import (
    LATENT,
    ROPE,
    MlaLengths,
    MlaOptions,
    Names,
    Parts,
    index_array,
    partials_in,
    split_rows,
)
from cute_attn.wrappers import mla as calls

__all__ = ["SchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


NAMES = Names("the workspace", "cache_seqlens", "block_table", "", "")
CACHE_AXES = "[num_pages, page_size, 1, 576]"


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
    q : `[batch_size, q_len, num_heads, 576]`, float16 or bfloat16.
    k_cache : `[num_pages, page_size, 1, 576]` of q's dtype; any page size.
    block_table : int32 `[batch_size, max_pages]`.
    cache_seqlens : int32 `[batch_size]`, keys of each request in tokens, those of the query tokens included.
    head_dim_v : 512; others are refused.
    tile_scheduler_metadata, num_splits : not read, whatever they are.
    softmax_scale : any finite number. Default 1 / sqrt(576).
    causal : True: query token r of a request sees keys j <= r + seq_len - q_len. False (default): all keys.
    is_fp8_kvcache : True is refused: rows of 656 bytes.
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
    if checks.boolean("is_fp8_kvcache", is_fp8_kvcache):
        trtllm_options.refuse("is_fp8_kvcache=True", "rows of 656 bytes have no kernel here", "a cache of q's dtype")
    for name, value in (
        *(("indices", indices), ("topk_length", topk_length), ("extra_k_cache", extra_k_cache)),
        *(("extra_indices_in_kvcache", extra_indices_in_kvcache), ("extra_topk_length", extra_topk_length)),
    ):
        if value is not None:
            trtllm_options.refuse(f"sparse MLA ({name})", *SPARSE)
    if attn_sink is not None:
        instead = "sinks of trtllm_batch_decode_with_kv_cache_mla"
        trtllm_options.refuse("attn_sink", "lse would have to leave out what out has", instead)
    calls.refuse_dims(("head_dim_v", "rotated columns"), (checks.integer("head_dim_v", head_dim_v), ROPE))
    queries = split_rows("q", q, (4,), "[batch_size, q_len, num_heads, 576]")
    cache = split_rows("k_cache", k_cache, (4,), CACHE_AXES)
    if k_cache.shape[2] != 1:
        raise ArgumentError(f"k_cache must have shape {CACHE_AXES}, got {checks.describe(k_cache)}")
    scale = checks.real_or("softmax_scale", softmax_scale, (LATENT + ROPE) ** -0.5)
    options = MlaOptions(NAMES, causal, scale, 1.0, None, None, True, "ln", None)
    parts = Parts(
        *(part._replace(x=part.x.flatten(0, 1)) for part in queries),
        *(part._replace(x=part.x[:, :, 0]) for part in cache),
    )
    scratch = partials_in("", q.new_empty(0, dtype=torch.uint8))  # launches take memory of their own
    problem = calls.run(parts, _lengths(q, block_table, cache_seqlens), scratch, options, "auto")
    assert problem.lse is not None
    batch_size, q_len = q.shape[:2]
    out, lse = (x.unflatten(0, (batch_size, q_len)) for x in (problem.out, problem.lse))
    return out, lse.transpose(1, 2)


def _lengths(q: torch.Tensor, block_table: Any, cache_seqlens: Any) -> MlaLengths:
    """Check lengths and the page table, which must have q's batch size."""
    table = checks.tensor("block_table", block_table)
    checks.dtype("block_table", table.dtype, (torch.int32,))
    if table.dim() != 2 or table.shape[0] != q.shape[0]:
        raise ArgumentError(
            f"block_table must have shape [batch_size, max_pages], a row for each of the {q.shape[0]} requests of q, "
            f"got {checks.describe(table)}"
        )
    seq_lens = index_array("cache_seqlens", cache_seqlens, q.shape[0], q.device)
    return MlaLengths(seq_lens, table.contiguous(), None, None, q.shape[1])
