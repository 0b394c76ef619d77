"""Ulysses: an exchange from token-sharded to head-sharded tensors, attention over whole sequences, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError, NotSupported, Refusal
from cute_attn.integrations.distributed.ranks import Ranks, check_tokens
from cute_attn.prefill import single_prefill_with_kv_cache
from cute_attn.request import checks

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window_left: int = -1,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    attention: Attention | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    group: Any = None,
) -> torch.Tensor:
    """Compute the attention of this rank's query tokens over the keys of all ranks, each rank for its share of heads.

    Ranks hold consecutive parts of the sequence, in order. `tokens_to_heads` gives every rank all tokens of its heads,
    `attention` runs on these, `heads_to_tokens` brings the outputs back. No gradients are computed.

    Parameters
    ----------
    q, k, v : `[tokens, num_heads, head_dim]`, tokens of this rank; heads as for `tokens_to_heads`.
    causal, window_left, sm_scale, logits_soft_cap, backend : as for `single_prefill_with_kv_cache`, over the whole
        sequence; `causal` is True by default.
    sinks : floating-point `[num_qo_heads]`, of all heads.
    attention : called with q, k and v of this rank's heads and all tokens, instead of `single_prefill_with_kv_cache`;
        returns `[all tokens, heads, head_dim_vo]`. It may be the run of a ragged wrapper, for batches. The options from
        `causal` to `backend` are then its own: giving one is an error.
    tokens_per_rank : tokens of each rank. Default: as many on every rank.
    group : process group. Default: all ranks.

    Position encodings are not offered: rotate q and k first.

    Returns
    -------
    `[tokens, num_qo_heads, head_dim_vo]` of q's dtype (bfloat16 for fp8 q), or of that of `attention`.

    Raises
    ------
    ArgumentTypeError, ArgumentError (shape, dtype, value, group), NotSupported (heads that ranks cannot share), and the
    errors of the attention call.
    """
    ranks = Ranks.of(group)
    options: dict[str, Any] = {
        "causal": causal,
        "window_left": window_left,
        "sm_scale": sm_scale,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "backend": backend,
    }
    if attention is not None:
        _refuse_options(attention, options)
    shared = tokens_to_heads(q, k, v, tokens_per_rank=tokens_per_rank, group=group)
    if attention is not None:
        out = attention(*shared)
    else:
        heads = q.shape[1] // ranks.world_size
        if sinks is not None:
            checks.shape("sinks", checks.tensor("sinks", sinks), (q.shape[1],), "[num_qo_heads]")
            options["sinks"] = sinks[ranks.rank * heads : (ranks.rank + 1) * heads]
        out = single_prefill_with_kv_cache(*shared, **options)  # type: ignore[assignment]
    return heads_to_tokens(out, tokens_per_rank=tokens_per_rank, group=group)


def tokens_to_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tokens_per_rank: Sequence[int] | None = None,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange tokens for heads: from all heads of this rank's tokens to all tokens of its heads. One all-to-all.

    Rank r gets query heads from r * num_qo_heads / world_size on, and the kv heads that these read. Fewer kv heads than
    ranks are replicated: each goes to world_size / num_kv_heads ranks.

    Parameters
    ----------
    q : `[tokens, num_qo_heads, head_dim_qk]`; world_size must divide num_qo_heads.
    k, v : `[tokens, num_kv_heads, head_dim]` of q's dtype; num_kv_heads must be a multiple of world_size or divide it.
    tokens_per_rank : tokens of each rank. Default: as many on every rank.
    group : process group. Default: all ranks.

    Returns
    -------
    (q, k, v) : `[all tokens, num_qo_heads / world_size, head_dim_qk]`, and k and v likewise with at least one head:
    views of one buffer, with unit stride on the last axis.

    Raises
    ------
    ArgumentTypeError, ArgumentError (shape, dtype, value, group), NotSupported (heads that ranks cannot share).
    """
    ranks = Ranks.of(group)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tokens(name, x)
        checks.device(name, x, q.device)
        if x.shape[0] != q.shape[0] or x.dtype != q.dtype:
            raise ArgumentError(f"{name} must have q's tokens and dtype, got {checks.describe(x)}")
    _check_heads(q.shape[1], k.shape[1], v.shape[1], ranks.world_size)
    tokens = _tokens(tokens_per_rank, q.shape[0], ranks, "q")
    parts = [_by_rank(x, ranks.world_size) for x in (q, k, v)]
    sent = torch.cat([part.flatten(2) for part in parts], dim=-1)  # [rank, token, features]
    received = sent.new_empty(sum(tokens), sent.shape[-1])
    ranks.all_to_all(received, sent.flatten(0, 1), tokens, [q.shape[0]] * ranks.world_size)
    features = received.split([part.shape[2] * part.shape[3] for part in parts], dim=-1)
    q, k, v = (x.unflatten(-1, part.shape[2:]) for x, part in zip(features, parts, strict=True))
    return q, k, v


def heads_to_tokens(
    out: torch.Tensor, *, tokens_per_rank: Sequence[int] | None = None, group: Any = None
) -> torch.Tensor:
    """Exchange heads for tokens: the way back from `tokens_to_heads`, for outputs. One all-to-all.

    Parameters
    ----------
    out : `[all tokens, heads of this rank, head_dim]`.
    tokens_per_rank : tokens of each rank. Default: as many on every rank.
    group : process group. Default: all ranks.

    Returns
    -------
    Contiguous `[tokens of this rank, heads of all ranks, head_dim]`.

    Raises
    ------
    ArgumentTypeError, ArgumentError (shape, value, group).
    """
    ranks = Ranks.of(group)
    check_tokens("out", out)
    if tokens_per_rank is None and out.shape[0] % ranks.world_size:
        raise ArgumentError(
            f"out must have as many tokens of each of {ranks.world_size} ranks, got {out.shape[0]}: "
            "pass tokens_per_rank"
        )
    local = out.shape[0] // ranks.world_size if tokens_per_rank is None else None
    tokens = _tokens(tokens_per_rank, local, ranks, "out")
    if sum(tokens) != out.shape[0]:
        raise ArgumentError(f"out must have sum(tokens_per_rank) = {sum(tokens)} tokens, got {checks.describe(out)}")
    own = tokens[ranks.rank]
    received = out.new_empty(ranks.world_size * own, *out.shape[1:])
    ranks.all_to_all(received, out.contiguous(), [own] * ranks.world_size, tokens)
    return received.unflatten(0, (ranks.world_size, own)).transpose(0, 1).flatten(1, 2)


def _by_rank(x: torch.Tensor, world_size: int) -> torch.Tensor:
    """View `[rank, token, heads of the rank, head_dim]`; heads that several ranks need appear in each."""
    tokens, heads, head_dim = x.shape
    if heads < world_size:
        x = x[:, :, None].expand(tokens, heads, world_size // heads, head_dim).flatten(1, 2)
    return x.unflatten(1, (world_size, -1)).transpose(0, 1)


def _check_heads(num_qo_heads: int, num_k_heads: int, num_v_heads: int, world_size: int) -> None:
    if num_k_heads != num_v_heads or num_k_heads < 1 or num_qo_heads % num_k_heads:
        raise ArgumentError(
            f"k and v must have the same number of heads, which divides q's {num_qo_heads}; "
            f"got {num_k_heads} and {num_v_heads}"
        )
    refusals = []
    if num_qo_heads % world_size:
        reason = f"{world_size} ranks cannot have as many of them each"
        refusals.append(Refusal("ulysses", f"num_qo_heads={num_qo_heads}", reason, "ring_prefill, or fewer ranks"))
    if num_k_heads % world_size and world_size % num_k_heads:
        reason = f"the query heads of one of {world_size} ranks would read parts of kv heads' groups"
        refusals.append(Refusal("ulysses", f"num_kv_heads={num_k_heads}", reason, "ring_prefill, or fewer ranks"))
    if refusals:
        raise NotSupported(refusals)


def _tokens(tokens_per_rank: Any, local: int | None, ranks: Ranks, name: str) -> list[int]:
    """Return the tokens of each rank. `local`: those of this rank, if the argument `name` tells."""
    if tokens_per_rank is None:
        assert local is not None
        return [local] * ranks.world_size
    if not isinstance(tokens_per_rank, (list, tuple)):
        raise ArgumentTypeError(f"tokens_per_rank must be a list of ints, got {checks.describe(tokens_per_rank)}")
    tokens = [checks.integer(f"tokens_per_rank[{i}]", count) for i, count in enumerate(tokens_per_rank)]
    if len(tokens) != ranks.world_size or min(tokens) < 0:
        raise ArgumentError(
            f"tokens_per_rank must have a number >= 0 for each of {ranks.world_size} ranks, got {checks.shown(tokens)}"
        )
    if local is not None and tokens[ranks.rank] != local:
        raise ArgumentError(
            f"{name} must have tokens_per_rank[{ranks.rank}] = {tokens[ranks.rank]} tokens, got {local}"
        )
    return tokens


def _refuse_options(attention: Any, options: dict[str, Any]) -> None:
    """Refuse options that a callable of the caller's would not get."""
    if not callable(attention):
        raise ArgumentTypeError(f"attention must be callable, got {checks.describe(attention)}")
    defaults = {"causal": True, "window_left": -1, "backend": "auto"}
    for name, value in options.items():
        if value is not defaults.get(name) and value != defaults.get(name):
            raise ArgumentError(f"{name} must not be given beside attention, which is called without it; got {value!r}")
