"""Zig-zag sharding of a sequence: 2 * world_size chunks, of which rank r holds r and 2 * world_size - 1 - r.

Under a causal mask every rank then sees as many keys as any other, in each step of a ring.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.integrations.distributed.ranks import Ranks
from cute_attn.request import checks


def chunk_lengths(seq_len: int, world_size: int) -> list[int]:
    """Return the tokens of each chunk; the first seq_len % (2 * world_size) have one more than the others."""
    shorter, longer = divmod(seq_len, 2 * world_size)
    return [shorter + (i < longer) for i in range(2 * world_size)]


def halves(chunks: list[int], rank: int) -> tuple[int, int]:
    """Return the tokens of a rank's first and second chunk."""
    return chunks[rank], chunks[-1 - rank]


def resolved_length(seq_len: Any, local: int, ranks: Ranks, name: str) -> int:
    """Return the tokens of all ranks. None: every rank has `local`, the tokens of argument `name`."""
    if seq_len is None:
        if local % 2:
            raise ArgumentError(
                f"{name} must have an even number of tokens, two chunks of the same length, got {local}; "
                "of a sequence that does not divide by 2 * world_size, pass seq_len"
            )
        return local * ranks.world_size
    seq_len = checks.integer("seq_len", seq_len)
    expected = sum(halves(chunk_lengths(max(seq_len, 0), ranks.world_size), ranks.rank))
    if seq_len < 0 or local != expected:
        raise ArgumentError(
            f"{name} must have the {expected} tokens that rank {ranks.rank} of {ranks.world_size} holds of "
            f"seq_len={seq_len}, got {local}"
        )
    return seq_len


def zigzag_positions(seq_len: int, *, device: torch.device | str | None = None, group: Any = None) -> torch.Tensor:
    """Compute the positions in the sequence of the tokens that this rank holds, for rotary embeddings.

    Parameters
    ----------
    seq_len : tokens of the whole sequence, >= 0. Chunks differ by one token at most.
    device : of the result. Default: torch's default device.
    group : process group. Default: all ranks.

    Returns
    -------
    int64 `[tokens of this rank]`, increasing.

    Raises
    ------
    ArgumentTypeError, ArgumentError (seq_len, group).
    """
    return shard_zigzag(torch.arange(checks.at_least("seq_len", seq_len, 0), device=device), group=group)


def shard_zigzag(x: torch.Tensor, *, dim: int = 0, group: Any = None) -> torch.Tensor:
    """Take the tokens that this rank holds. No communication.

    Parameters
    ----------
    x : a tensor with all tokens of the sequence on axis `dim`.
    dim : axis of tokens, default 0.
    group : process group. Default: all ranks.

    Returns
    -------
    A copy, contiguous, with the two chunks of this rank on axis `dim`.

    Raises
    ------
    ArgumentTypeError, ArgumentError (x, dim, group).
    """
    ranks, dim = Ranks.of(group), _axis(x, dim)
    chunks = x.split(chunk_lengths(x.shape[dim], ranks.world_size), dim)
    return torch.cat((chunks[ranks.rank], chunks[-1 - ranks.rank]), dim)


def unshard_zigzag(x: torch.Tensor, *, dim: int = 0, seq_len: int | None = None, group: Any = None) -> torch.Tensor:
    """Collect the tokens of all ranks in order: the inverse of `shard_zigzag`, on every rank. One all-gather.

    Parameters
    ----------
    x : this rank's tokens on axis `dim`; otherwise of the same shape and dtype on every rank.
    dim : axis of tokens, default 0.
    seq_len : tokens of the whole sequence. Default: as many on every rank, in two chunks of the same length.
    group : process group. Default: all ranks.

    Returns
    -------
    A contiguous tensor with seq_len tokens on axis `dim`.

    Raises
    ------
    ArgumentTypeError, ArgumentError (x, dim, seq_len, group).
    """
    ranks, dim = Ranks.of(group), _axis(x, dim)
    seq_len = resolved_length(seq_len, x.shape[dim], ranks, "x")
    chunks = chunk_lengths(seq_len, ranks.world_size)
    tokens_first = x.movedim(dim, 0)
    most = max(sum(halves(chunks, r)) for r in range(ranks.world_size))
    own = tokens_first.new_zeros(most, *tokens_first.shape[1:])
    own[: tokens_first.shape[0]] = tokens_first
    gathered = own.new_empty(ranks.world_size, *own.shape)
    if own.numel():
        ranks.all_gather(gathered, own)
    parts = [gathered[r].split([*halves(chunks, r), most - sum(halves(chunks, r))]) for r in range(ranks.world_size)]
    ordered = [part[0] for part in parts] + [part[1] for part in reversed(parts)]
    return torch.cat(ordered).movedim(0, dim).contiguous()


def _axis(x: Any, dim: Any) -> int:
    """Check a tensor and its axis; return the axis counted from the front."""
    axes = checks.tensor("x", x).dim()
    if not -axes <= checks.integer("dim", dim) < axes:
        raise ArgumentError(f"dim must be an axis of x, within {-axes}..{axes - 1}, got {dim}")
    return dim % axes
