"""Custom ops, so that a layer is one node of a graph that torch.compile traces.

`decode` reads lengths and pages on the device and may be captured in a CUDA graph. `planned` reads them on the host, in
every layer; inductor leaves it out of CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.integrations.transformers import descriptors, forward
from cute_attn.integrations.transformers.plans import Operands, token_pages

NAMESPACE = "cute_attn_transformers"
OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, float soft_cap, str backend"  # fields of Operands
EXACT = (torch.Tag.needs_exact_strides,)  # caches are read in place


def _decode(*arguments: Any) -> torch.Tensor:
    """Run one query token per request: `forward.run_decode`. `numbering`: of the pages that tables of tokens count."""
    *fields, lengths, tables, numbering = arguments
    operands = Operands(*fields)
    if numbering and numbering != page_numbering(operands.k, operands.v):
        raise RuntimeError("a graph gave keys or values other strides than it was traced with: report this")
    return forward.run_decode(operands, lengths, tables)


def _planned(*arguments: Any) -> torch.Tensor:
    """Run any layer: `forward.run`. A graph may reuse the memory of its masks, so that nothing is kept on them, but on
    views of them.
    """
    *fields, mask, causal, window_left = arguments
    return forward.run(Operands(*fields), None if mask is None else mask[:], causal, window_left)


def page_numbering(k: torch.Tensor, v: torch.Tensor) -> list[int]:
    """Return the distances, in pages of one token, from a request and from a token to the next."""
    pages = token_pages(k, v)
    return [pages.request, pages.token]


def _output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    """Return what a layer allocates: `[batch, q_len, heads, head_dim_vo]`, without gaps."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


for _name, _function, _arguments, _marks in (
    ("decode", _decode, "Tensor lengths, Tensor tables, SymInt[] numbering", EXACT),
    ("planned", _planned, "Tensor? mask, bool causal, SymInt window_left", (*EXACT, torch.Tag.cudagraph_unsafe)),
):
    _op = f"{NAMESPACE}::{_name}"
    torch.library.define(_op, f"({OPERANDS}, {_arguments}) -> Tensor", tags=_marks)
    torch.library.impl(_op, "CompositeExplicitAutograd", _function)
    torch.library.register_fake(_op, _output)
_ops = getattr(torch.ops, NAMESPACE)


def traced(operands: Operands, mask: torch.Tensor | None, causal: bool, window_left: int) -> torch.Tensor:
    """Return the node of a layer."""
    q, k, v = operands[:3]
    if mask is not None and q.shape[2] == 1 and forward.runs_on_xqa(operands):
        if mask.dtype == torch.bool:
            forward.check_mask(mask, q, k)
            mask = forward.as_decode(mask, q.shape[0])
        if descriptors.is_decode(mask):
            lengths, tables = forward.decode_tables(operands, mask)
            numbering = page_numbering(k, v) if tables.shape[1] > 1 else []
            out: torch.Tensor = _ops.decode(*operands, lengths, tables, numbering)
            return out
    out = _ops.planned(*operands, mask, causal, window_left)
    return out
