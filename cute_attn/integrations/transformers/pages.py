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


def numbering(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the coarsest numbering of the tokens of `[batch, heads, tokens, head_dim]`: the elements from a page to
    the next, and the pages from a request and from a token to the next.
    """
    batch, _, tokens, _ = x.shape
    request, token = x.stride(0), x.stride(2)
    if batch == 1:
        return token, tokens, 1
    if tokens == 1:
        return request, 1, 1
    unit = math.gcd(request, token)
    return unit, request // unit, token // unit


def token_pages(k: torch.Tensor, v: torch.Tensor) -> TokenPages:
    """Return views of k and v with one numbering.

    Only where the batch is in another order in v than in k, which no cache does, v is copied to k's order.
    """
    of_k, of_v = numbering(k), numbering(v)
    if of_k[1:] != of_v[1:]:
        k, v = k.contiguous(), v.contiguous()
        of_k, of_v = numbering(k), numbering(v)
    return TokenPages(_view(k, *of_k), _view(v, *of_v), *of_k[1:])


def _view(x: torch.Tensor, unit: int, request: int, token: int) -> torch.Tensor:
    batch, heads, tokens, width = x.shape
    pages = (batch - 1) * request + (tokens - 1) * token + 1
    return x.as_strided((pages, heads, 1, width), (unit, x.stride(1), unit, x.stride(3)))
