"""Plans of batch wrappers that the layers of a forward pass share.

A plan is looked up by what it depends on: the runs of query rows (or the mask), and the structure of the layer's
tensors. The first layer of a type makes it, the others find it; so does the next forward pass of the same lengths.

A layer gets k and v as `[batch, kv_heads, tokens, head_dim]` with the strides of its cache. Where every request sees
its first keys, each request is one page of `tokens` tokens. Otherwise a page is one token, at any distance from the
next, and the page numbers say which tokens a request sees: padding on the left, packed sequences, gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch

from cute_attn.integrations import workspaces
from cute_attn.integrations.transformers import descriptors
from cute_attn.integrations.transformers.descriptors import Rows
from cute_attn.request.batch_plan import PlanOptions
from cute_attn.request.index_arrays import bounds, int32
from cute_attn.wrappers.planned_prefill import Place, Session, Structure, place_of

PLANS_PER_KIND = 2  # encoder and decoder, or layers with and without a window in a decode, differ in lengths only


def index_arrays(rows: Rows, pages: TokenPages | None) -> tuple[torch.Tensor, ...]:
    """Return qo_indptr, kv_indptr, kv_indices and last_page_len of a plan, int32 on the host. Every key is a page of
    `pages`; without them a request's keys are one.
    """
    q_len, request, kv_len = (np.array([getattr(r, f) for r in rows.runs]) for f in ("q_len", "request", "kv_len"))
    if pages is None:
        live = kv_len > 0
        arrays = bounds(q_len), bounds(live), request[live], np.maximum(kv_len, 1)
    else:
        tokens = [np.arange(r.kv_start, r.kv_start + r.kv_len) for r in rows.runs]
        numbers = [r.request * pages.request + own * pages.token for r, own in zip(rows.runs, tokens, strict=True)]
        arrays = bounds(q_len), bounds(kv_len), np.concatenate(numbers), np.ones(len(rows.runs), np.int64)
    return tuple(map(int32, arrays))


class Operands(NamedTuple):
    """The tensors of a layer as transformers gives them, and its options."""

    q: torch.Tensor  # [batch, heads, q_len, head_dim]
    k: torch.Tensor  # [batch, kv_heads, kv_len, head_dim]
    v: torch.Tensor
    sinks: torch.Tensor | None
    scale: float
    soft_cap: float
    backend: str


def run_rows(
    operands: Operands, rows: Rows, identity: Hashable = None, seen: Callable[[], torch.Tensor] | None = None
) -> torch.Tensor:
    """Compute runs of query rows over ranges of keys; returns `[batch, q_len, heads, head_dim]`.

    `seen`: makes a mask of all runs, 1-D; `identity` stands for its values. Scales are factors of a run: layers of
    different scales share a plan.
    """
    batch, heads, q_len, width = operands.q.shape
    kv, pages, device, dtype = (operands.k, operands.v), None, operands.q.device, operands.q.dtype
    if any(run.kv_start for run in rows.runs):  # not the first keys of its request
        pages = token_pages(*kv)
        kv = pages.k, pages.v
    k, v = (x.transpose(1, 2) for x in kv)
    page_size, band = k.shape[1], (rows.causal, rows.window_left)
    options = PlanOptions(
        heads, k.shape[2], width, v.shape[3], dtype, dtype, dtype, "NONE", *band, operands.soft_cap, 1.0
    )
    content = rows.runs, page_size, None if pages is None else (pages.request, pages.token), identity
    place = place_of(device)
    with place.lock:
        session = _session(place, operands, (options, seen is not None), content)
        if session.content != content:
            session.content = None
            qo_indptr, kv_indptr, indices, last_page_len = index_arrays(rows, pages)
            where = qo_indptr, kv_indptr, indices.to(device, non_blocking=True), last_page_len
            mask = None if seen is None else seen()
            session.wrapper.plan(*where, page_size=page_size, custom_mask=mask, **options._asdict())
            session.content = content
        query = operands.q.transpose(1, 2).reshape(batch * q_len, heads, width)
        out = session.wrapper.run(query, (k, v), q_scale=operands.scale, sinks=operands.sinks)
    assert isinstance(out, torch.Tensor)
    return out.view(batch, q_len, heads, -1)


def run_mask(operands: Operands, mask: torch.Tensor, identity: Hashable, bounds: tuple[int, ...] = ()) -> torch.Tensor:
    """Compute attention under a boolean mask `[batch or 1, 1, q_len, kv_len]`.

    `identity`: a hashable that stands for the mask's values. `bounds`: of packed sequences.
    """
    batch, _, q_len, _ = operands.q.shape
    kv_len = operands.k.shape[2]

    def seen() -> torch.Tensor:
        found = descriptors.visible(mask)
        if bounds:
            starts = torch.tensor(bounds, dtype=torch.int64, device=mask.device)
            number = torch.bucketize(torch.arange(q_len, device=mask.device), starts, right=True)
            found = found & (number[:, None] == number)
        return found.expand(batch, 1, q_len, kv_len).reshape(-1)

    rows = descriptors.whole(batch, q_len, (kv_len,) * batch, False, -1)
    return run_rows(operands, rows, (identity, bounds), seen)


def _session(place: Place, operands: Operands, kind: tuple[PlanOptions, bool], content: Hashable) -> Session:
    """Return the session planned for `content`, or the least recently used one of a kind: options, and whether there is
    a mask.
    """
    (options, masked), keys = kind, []
    for number in range(PLANS_PER_KIND):
        # The plan of each pass has another page size, that of its cache: the key says only that there are pages.
        keys.append(Structure(operands.backend, 1, 0, options, (masked, number)))
        session = place.sessions.get(keys[-1])
        if session is None:
            break
        if session.content == content:
            place.sessions.move_to_end(keys[-1])
            return session
    else:
        keys.append(next(key for key in place.sessions if key in keys))
    return place.session(workspaces.of_stream(operands.q.device), keys[-1])


# ---- keys and values as pages, without copies


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
