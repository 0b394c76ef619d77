"""Views of a layer's keys and values as pages, without copies.

A layer gets k and v as `[batch, kv_heads, tokens, head_dim]` with the strides of its cache. Where every request sees
its first keys, each request is one page of `tokens` tokens. Otherwise a page is one token, at any distance from the
next, and the page numbers say which tokens a request sees: padding on the left, packed sequences, gaps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class TokenPages(NamedTuple):
    """k and v as `[pages, kv_heads, 1, head_dim]`: token s of request b is page b * request + s * token."""

    k: torch.Tensor
    v: torch.Tensor
    request: int
    token: int


class Numbering(NamedTuple):
    """Page numbers of a tensor whose first and third axes are split into pages of one token."""

    unit: int  # elements from a page to the next
    request: int  # pages
    token: int


def numbering(x: torch.Tensor) -> Numbering:
    """Return the coarsest numbering of the tokens of `[batch, heads, tokens, head_dim]`."""
    batch, _, tokens, _ = x.shape
    request, token = x.stride(0), x.stride(2)
    if batch == 1:
        return Numbering(token, tokens, 1)
    if tokens == 1:
        return Numbering(request, 1, 1)
    unit = math.gcd(request, token)
    return Numbering(unit, request // unit, token // unit)


def token_pages(k: torch.Tensor, v: torch.Tensor) -> TokenPages:
    """Return views of k and v with one numbering.

    Only where the batch is in another order in v than in k, which no cache does, v is copied to k's order.
    """
    of_k, of_v = numbering(k), numbering(v)
    if of_k[1:] != of_v[1:]:
        k, v = k.contiguous(), v.contiguous()
        of_k, of_v = numbering(k), numbering(v)
    return TokenPages(_view(k, of_k), _view(v, of_v), of_k.request, of_k.token)


def _view(x: torch.Tensor, numbers: Numbering) -> torch.Tensor:
    batch, heads, tokens, width = x.shape
    pages = (batch - 1) * numbers.request + (tokens - 1) * numbers.token + 1
    return x.as_strided((pages, heads, 1, width), (numbers.unit, x.stride(1), numbers.unit, x.stride(3)))
