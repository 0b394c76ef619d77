"""What the attention function refuses, before anything runs: each with the reason and what to use instead."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.request import checks
from cute_attn.request.settings import HALF

WEIGHTS = "attention weights are never in memory"
EAGER = 'attn_implementation="eager"'
refuse = functools.partial(checks.refuse, who="cute_attn")


def check_call(
    module: torch.nn.Module, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dropout: float, options: Any
) -> None:
    """Refuse what the kernels cannot do: gradients, dropout, weights as output, biases, other dtypes."""
    if dropout:
        refuse(f"dropout = {dropout}", "the kernels are for inference", f"model.eval(), or {EAGER} to train")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        where = "in training mode" if module.training else "with gradients"
        refuse(f"a forward pass {where}", "no backward pass exists", f"torch.no_grad(), or {EAGER} to train")
    if options.get("output_attentions"):
        refuse("output_attentions=True", WEIGHTS, EAGER)
    if options.get("head_mask") is not None:
        refuse("head_mask", WEIGHTS, EAGER)
    if options.get("position_bias") is not None:
        refuse("position_bias", "scores get no bias", EAGER)
    if options.get("cache") is not None:
        refuse("the paged cache of continuous batching", "transformers asks for a flash implementation", "generate()")
    if options.get("cu_seq_lens_q") is None and options.get("cu_seq_lens_k") is not None:
        raise ArgumentError("cu_seq_lens_q must be given with cu_seq_lens_k, got None")
    q, k, v = tensors
    for name, x in (("query", q), ("key", k), ("value", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            raise ArgumentTypeError(f"{name} must be a tensor [batch, heads, tokens, head_dim]")
    if q.dtype not in HALF:
        refuse(f"query of {q.dtype}", "the matrix instructions take 16 bits", "from_pretrained(dtype=torch.bfloat16)")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ArgumentError(f"query, key and value must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")


def check_mask(mask: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Check the shape of an exact mask."""
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[1] != 1 or shape[0] not in (1, q.shape[0]) or shape[2:] != (q.shape[2], k.shape[2]):
        raise ArgumentError(
            f"attention_mask must have shape [batch or 1, 1, q_len, kv_len] = [{q.shape[0]}, 1, {q.shape[2]}, "
            f"{k.shape[2]}], the same for all heads, got {list(shape)}"
        )


def bounds(q_lens: torch.Tensor, k_lens: torch.Tensor | None, batch: int, q_len: int, kv_len: int) -> tuple[int, ...]:
    """Return the bounds of packed sequences: one row of tokens, without a cache; of a single one none."""
    found = tuple(q_lens.tolist())
    if (
        batch != 1
        or kv_len != q_len
        or not found
        or (found[0], found[-1]) != (0, q_len)
        or list(found) != sorted(found)
    ):
        raise ArgumentError(
            f"cu_seq_lens_q must go from 0 to the tokens of one row, {q_len}, without cached keys, got {list(found)} "
            f"for {batch} rows of {q_len} queries and {kv_len} keys"
        )
    if k_lens is not None and k_lens is not q_lens and tuple(k_lens.tolist()) != found:
        raise ArgumentError(f"cu_seq_lens_k must be cu_seq_lens_q, {list(found)}, or None, got {k_lens.tolist()}")
    return found if len(set(found)) > 2 else ()
