"""Keys of latent attention before absorption, from their two parts (FlashInfer's `flashinfer.concat_ops`)."""

from __future__ import annotations

import torch

from cute_attn.errors import ArgumentError
from cute_attn.request import checks

__all__ = ["concat_mla_k"]


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default") -> None:
    """Write the keys of all heads: each has its own first columns and the same rotated ones.

    Torch operations, which CUDA graphs can capture.

    Parameters
    ----------
    k : `[num_tokens, num_heads, nope_dim + rope_dim]` of any dtype, unit stride on the last axis, no two elements in
        the same memory. Written.
    k_nope : `[num_tokens, num_heads, nope_dim]` of k's dtype.
    k_rope : `[num_tokens, 1, rope_dim]` of k's dtype, shared by all heads.
    backend : "default"; FlashInfer's "cake" is refused.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device, strides, shared memory), LayoutError and
    NotSupported (backend).

    Examples
    --------
    >>> k = torch.empty(3, 2, 192)
    >>> concat_mla_k(k, torch.zeros(3, 2, 128), torch.ones(3, 1, 64))
    >>> k.sum((0, 2))
    tensor([192., 192.])
    """
    if backend != "default":
        checks.choice("backend", backend, ("default", "cake"))
        checks.refuse(f"backend={backend!r}", "it is not part of this library", 'backend="default"')
    parts = ("k_nope", checks.tensor("k_nope", k_nope)), ("k_rope", checks.tensor("k_rope", k_rope))
    tokens, heads, width = (*checks.tensor("k", k).shape, 0, 0, 0)[:3]
    checks.dense("k", k)
    checks.apart((("k", k),), parts)
    for (name, x), shared in zip(parts, (heads, 1), strict=True):
        if k.dim() != 3 or x.dim() != 3 or x.shape[:2] != (tokens, shared) or x.dtype != k.dtype:
            raise ArgumentError(
                f"{name} must have shape [num_tokens, num_heads of k or 1, columns] = [{tokens}, {shared}, ...] and "
                f"k's dtype, got {checks.describe(x)} and k {checks.describe(k)}"
            )
        checks.device(name, x, k.device, "k's device")
        checks.check_grad(name, x)
    nope = k_nope.shape[2]
    if nope + k_rope.shape[2] != width:
        raise ArgumentError(f"k must have nope_dim + rope_dim = {nope} + {k_rope.shape[2]} columns, got {width}")
    k[..., :nope].copy_(k_nope)
    k[..., nope:].copy_(k_rope)
