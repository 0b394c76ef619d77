"""Round-robin sharding of a paged cache by tokens: page p of a request belongs to rank p % world_size.

Shares of a request differ by one page at most while it grows, whatever its length: this is the placement for decode.
"""

from __future__ import annotations

import torch

from cute_attn.errors import ArgumentError
from cute_attn.request import checks

INT_DTYPES = (torch.int32, torch.int64)


def shard_kv_lens(kv_lens: torch.Tensor, page_size: int, rank: int, world_size: int) -> torch.Tensor:
    """Count the tokens of each request that a rank holds.

    Parameters
    ----------
    kv_lens : int32 or int64 of any shape and device: tokens of each request, >= 0.
    page_size : tokens per page, at least 1.
    rank, world_size : of the group over which pages are dealt out; rank is in 0..world_size - 1.

    Returns
    -------
    A tensor of kv_lens' shape, dtype and device. Over all ranks it sums to kv_lens.

    Raises
    ------
    ArgumentTypeError (not a tensor or int), ArgumentError (dtype or value).

    Examples
    --------
    >>> shard_kv_lens(torch.tensor([100, 5]), 16, 1, 2)
    tensor([48,  0])
    """
    checks.dtype("kv_lens", checks.tensor("kv_lens", kv_lens).dtype, INT_DTYPES)
    page_size, world_size = checks.at_least("page_size", page_size, 1), checks.at_least("world_size", world_size, 1)
    rank = checks.integer("rank", rank)
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank must be in 0..{world_size - 1}, got {rank}")
    round_of_pages = page_size * world_size
    rest = kv_lens % round_of_pages - rank * page_size  # tokens of the last round, from this rank's page on
    return kv_lens // round_of_pages * page_size + rest.clamp(0, page_size)


def shard_positions(positions: torch.Tensor, page_size: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the rank that holds each token of a request, and the token's position among those of that rank.

    Parameters
    ----------
    positions : int32 or int64 of any shape and device: positions in the request, from 0.
    page_size, world_size : as for `shard_kv_lens`.

    Returns
    -------
    (owner, position) : tensors of positions' shape, dtype and device.

    Raises
    ------
    ArgumentTypeError (not a tensor or int), ArgumentError (dtype or value).
    """
    checks.dtype("positions", checks.tensor("positions", positions).dtype, INT_DTYPES)
    page_size, world_size = checks.at_least("page_size", page_size, 1), checks.at_least("world_size", world_size, 1)
    page = positions // page_size
    return page % world_size, page // world_size * page_size + positions % page_size
