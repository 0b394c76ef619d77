"""Page tables in which keys and values have pages of their own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError, NotSupported, Refusal
from cute_attn.request import checks


class Paged(NamedTuple):
    """Keys, values, and the table `[batch_size, max_pages]` of both."""

    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor


def joined(paged: Paged, seq_lens: torch.Tensor, page_size: int, origin: int = 0) -> Paged:
    """Return views of k and v in which both are at the same pages.

    `paged.tables` is `[batch_size, 2, max_pages]`: pages of keys, then pages of values, which are counted from page
    -`origin` of v. Kernels read one table, so that the values of all requests must be the same number of pages away
    from their keys: the same pages, or both halves of one pool. Finding that out costs a synchronisation on a GPU,
    except where both rows of the table are the same memory.
    """
    k, v, tables = paged
    tables = _checked(tables)
    keys, values = tables.unbind(1)
    if tables.stride(1) == 0 and origin == 0:
        return Paged(k, v, keys)
    if tables.is_cuda and torch.cuda.is_current_stream_capturing():
        _refuse("while a CUDA graph is captured", "it cannot look at the table then")
    lengths = _lengths(seq_lens, tables)
    live = torch.arange(tables.shape[2], device=tables.device) * page_size < lengths.to(tables.device)[:, None]
    apart = (values.long() - keys.long())[live]
    if apart.numel() == 0:
        return Paged(k, v, keys)
    nearest, farthest = torch.stack(apart.aminmax()).tolist()
    if nearest != farthest:
        _refuse("at different distances", "it reads one page table for keys and values")
    shift = nearest - origin
    pages = min(k.shape[0], v.shape[0]) - abs(shift)
    if pages <= 0:
        raise ArgumentError(f"block_tables has pages of values {shift} pages from their keys, beyond the cache")
    if shift >= 0:
        return Paged(k[:pages], v[shift : shift + pages], keys)
    return Paged(k[-shift : pages - shift], v[:pages], keys + shift)


def _checked(tables: Any) -> torch.Tensor:
    tables = checks.readable("block_tables", tables)
    checks.dtype("block_tables", tables.dtype, (torch.int32,))
    if tables.dim() != 3 or tables.shape[1] != 2:
        raise ArgumentError(
            "block_tables must have shape [batch_size, 2, max_pages] where keys and values have their own pages, "
            f"got {checks.describe(tables)}"
        )
    return tables


def _lengths(seq_lens: Any, tables: torch.Tensor) -> torch.Tensor:
    """Return the lengths of all rows of tables, in a dtype that compares."""
    flat = checks.tensor("seq_lens", seq_lens).reshape(-1)
    checks.dtype("seq_lens", flat.dtype, (torch.int32, torch.uint32, torch.int64))
    if len(flat) != len(tables):
        raise ArgumentError(
            f"seq_lens must have one length for each of the {len(tables)} rows of block_tables, got {len(flat)}"
        )
    if not flat.is_cpu:
        checks.device("seq_lens", flat, tables.device)
    return flat.view(torch.int32) if flat.dtype == torch.uint32 else flat


def _refuse(how: str, reason: str) -> None:
    feature = f"pages of values and of keys in tables of their own {how}"
    raise NotSupported([Refusal("every backend", feature, reason, "block_tables [batch_size, max_pages]")])
