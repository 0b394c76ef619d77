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

PLANS_PER_STRUCTURE = 2  # encoder and decoder, or layers with and without a window in a decode, differ in lengths only


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


def run_rows(operands: Operands, rows: Rows) -> torch.Tensor:
    """Compute runs of query rows over ranges of keys."""
    kv, pages = (operands.k, operands.v), None
    if any(run.kv_start for run in rows.runs):  # not the first keys of its request
        pages = token_pages(*kv)
        kv = pages.k, pages.v
    content = rows.runs, None if pages is None else (pages.request, pages.token)
    return _run(operands, kv, (rows.causal, rows.window_left), content, lambda: (index_arrays(rows, pages), None))


def run_mask(operands: Operands, mask: torch.Tensor, identity: Hashable, bounds: tuple[int, ...] = ()) -> torch.Tensor:
    """Compute attention under a boolean mask `[batch or 1, 1, q_len, kv_len]`.

    `identity`: a hashable that stands for the mask's values. `bounds`: of packed sequences.
    """
    batch, _, q_len, _ = operands.q.shape
    kv_len = operands.k.shape[2]

    def planned() -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        rows = descriptors.whole(batch, q_len, [kv_len] * batch, causal=False, window_left=-1)
        seen = descriptors.visible(mask)
        if bounds:
            starts = torch.tensor(bounds, dtype=torch.int64, device=mask.device)
            number = torch.bucketize(torch.arange(q_len, device=mask.device), starts, right=True)
            seen = seen & (number[:, None] == number)
        return index_arrays(rows, None), seen.expand(batch, 1, q_len, kv_len).reshape(-1)

    return _run(operands, (operands.k, operands.v), None, (identity, batch, q_len, bounds), planned)


def _run(
    operands: Operands,
    kv: tuple[torch.Tensor, torch.Tensor],
    band: tuple[bool, int] | None,
    content: tuple[Hashable, ...],
    planned: Callable[[], tuple[tuple[torch.Tensor, ...], torch.Tensor | None]],
) -> torch.Tensor:
    """Run the plan for `content`, made where there is none of it; returns `[batch, q_len, heads, head_dim]`.

    `kv`: pages. `band`: causal and window_left; None: there is a mask. `planned`: index arrays and mask of a plan.
    Scales are factors of a run: layers of different scales share a plan.
    """
    batch, heads, q_len, width = operands.q.shape
    (k, v), device, dtype = (x.transpose(1, 2) for x in kv), operands.q.device, operands.q.dtype
    sizes, (causal, window_left) = (heads, k.shape[2], width, v.shape[3]), band or (False, -1)
    options = PlanOptions(*sizes, dtype, dtype, dtype, "NONE", causal, window_left, operands.soft_cap, 1.0)
    # The plan of each pass has another page size, that of its cache: the structure says only that there are pages.
    structure = Structure(operands.backend, 1, 0, options, variety=band is None)
    place, content = place_of(device), (k.shape[1], *content)
    with place.lock:
        session = _session(place, device, structure, content)
        if session.content != content:
            session.content = None
            (qo_indptr, kv_indptr, indices, last_page_len), mask = planned()
            where = qo_indptr, kv_indptr, indices.to(device, non_blocking=True), last_page_len
            session.wrapper.plan(*where, page_size=k.shape[1], custom_mask=mask, **options._asdict())
            session.content = content
        query = operands.q.transpose(1, 2).reshape(batch * q_len, heads, width)
        out = session.wrapper.run(query, (k, v), q_scale=operands.scale, sinks=operands.sinks)
    assert isinstance(out, torch.Tensor)
    return out.view(batch, q_len, heads, -1)


def _session(place: Place, device: torch.device, structure: Structure, content: Hashable) -> Session:
    """Return the session planned for `content`, or the least recently used one of its structure."""
    all_of_it = [structure._replace(variety=(structure.variety, i)) for i in range(PLANS_PER_STRUCTURE)]
    known = [key for key in place.sessions if key in all_of_it]
    planned = [key for key in known if place.sessions[key].content == content]
    unused = [key for key in all_of_it if key not in known]
    return place.session(workspaces.of_stream(device), (planned or unused or known)[0])


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
