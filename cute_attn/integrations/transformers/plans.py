"""Plans of batch wrappers that the layers of a forward pass share.

A plan is looked up by what it depends on: the runs of query rows (or the mask), and the structure of the layer's
tensors. The first layer of a type makes it, the others find it; so does the next forward pass of the same lengths.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch

from cute_attn.integrations import workspaces
from cute_attn.integrations.transformers import descriptors
from cute_attn.integrations.transformers.descriptors import Rows
from cute_attn.integrations.transformers.pages import TokenPages, token_pages
from cute_attn.prefill import BatchPrefillWithPagedKVCacheWrapper
from cute_attn.request.batch_plan import PlanOptions
from cute_attn.request.index_arrays import bounds, int32
from cute_attn.wrappers.planned_prefill import kept

MAX_STRUCTURES = 32
PLANS_PER_STRUCTURE = 2  # encoder and decoder, or two models, may differ in lengths only


class Structure(NamedTuple):
    """What a plan depends on besides lengths and masks."""

    device: torch.device
    stream: int
    backend: str
    options: PlanOptions
    masked: bool


class Content(NamedTuple):
    """What else it depends on. `identity` stands for the runs, or for a mask."""

    identity: Hashable
    page_size: int
    numbering: tuple[int, int]  # of pages of one token
    bounds: tuple[int, ...] = ()  # of packed sequences, beside a mask


class Session:
    """A wrapper and what it is planned for."""

    def __init__(self, structure: Structure) -> None:
        workspace = workspaces.of_stream(structure.device)
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=structure.backend)
        self.content: Content | None = None


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


_sessions: OrderedDict[Structure, list[Session]] = OrderedDict()
_lock = threading.Lock()  # one thread at a time uses them


def _session(structure: Structure, content: Content) -> Session:
    """Return the session planned for `content`, or the least recently used one, whose `content` is then None."""
    sessions = kept(_sessions, structure, list[Session], MAX_STRUCTURES)
    planned = next((i for i, session in enumerate(sessions) if session.content == content), None)
    if planned is None and len(sessions) < PLANS_PER_STRUCTURE:
        sessions.append(Session(structure))
    else:
        sessions.append(sessions.pop(planned or 0))
    if planned is None:
        sessions[-1].content = None
    return sessions[-1]


class Operands(NamedTuple):
    """The tensors of a layer as transformers gives them, and its options."""

    q: torch.Tensor  # [batch, heads, q_len, head_dim]
    k: torch.Tensor  # [batch, kv_heads, kv_len, head_dim]
    v: torch.Tensor
    sinks: torch.Tensor | None
    scale: float
    soft_cap: float
    backend: str

    def structure(self, causal: bool, window_left: int, masked: bool) -> Structure:
        """Return what a plan for them depends on."""
        device, dtype = self.q.device, self.q.dtype
        options = PlanOptions(
            num_qo_heads=self.q.shape[1],
            num_kv_heads=self.k.shape[1],
            head_dim_qk=self.q.shape[3],
            head_dim_vo=self.v.shape[3],
            q_data_type=dtype,
            kv_data_type=dtype,
            o_data_type=dtype,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=self.soft_cap,
            sm_scale=1.0,  # see `_run`
        )
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return Structure(device, stream, self.backend, options, masked)


def run_rows(operands: Operands, rows: Rows) -> torch.Tensor:
    """Compute runs of query rows over ranges of keys."""
    k, v = operands.k, operands.v
    pages, page_size, numbers = None, k.shape[2], (0, 0)
    if any(run.kv_start for run in rows.runs):  # not the first keys of its request
        pages = token_pages(k, v)
        k, v, page_size, numbers = pages.k, pages.v, 1, (pages.request, pages.token)
    structure = operands.structure(rows.causal, rows.window_left, masked=False)
    content = Content(rows.runs, page_size, numbers)
    return _run(operands, structure, content, (k, v), lambda: (index_arrays(rows, pages), None))


def run_mask(operands: Operands, mask: torch.Tensor, identity: Hashable, bounds: tuple[int, ...] = ()) -> torch.Tensor:
    """Compute attention under a boolean mask `[batch or 1, 1, q_len, kv_len]`.

    `identity`: a hashable that stands for the mask's values. `bounds`: of packed sequences.
    """
    k, v = operands.k, operands.v
    batch, _, q_len, _ = operands.q.shape
    page_size = k.shape[2]

    def planned() -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        rows = descriptors.whole(batch, q_len, [page_size] * batch, causal=False, window_left=-1)
        seen = descriptors.visible(mask)
        if bounds:
            starts = torch.tensor(bounds, dtype=torch.int64, device=mask.device)
            number = torch.bucketize(torch.arange(q_len, device=mask.device), starts, right=True)
            seen = seen & (number[:, None] == number)
        return index_arrays(rows, None), seen.expand(batch, 1, q_len, page_size).reshape(-1)

    structure = operands.structure(causal=False, window_left=-1, masked=True)
    return _run(operands, structure, Content(identity, page_size, (batch, q_len), bounds), (k, v), planned)


def _run(
    operands: Operands,
    structure: Structure,
    content: Content,
    kv: tuple[torch.Tensor, torch.Tensor],
    planned: Callable[[], tuple[tuple[torch.Tensor, ...], torch.Tensor | None]],
) -> torch.Tensor:
    """Run the plan for `content`, made where there is none of it; returns `[batch, q_len, heads, head_dim]`.

    `planned`: its index arrays and mask. Scales are factors of a run: layers of different scales share a plan.
    """
    batch, heads, q_len, width = operands.q.shape
    with _lock:
        session = _session(structure, content)
        if session.content is None:
            (qo_indptr, kv_indptr, indices, last_page_len), mask = planned()
            where = qo_indptr, kv_indptr, indices.to(structure.device, non_blocking=True), last_page_len
            options = {"page_size": content.page_size, "custom_mask": mask, **structure.options._asdict()}
            session.wrapper.plan(*where, **options)
            session.content = content
        query = operands.q.transpose(1, 2).reshape(batch * q_len, heads, width)
        out = session.wrapper.run(query, kv, q_scale=operands.scale, sinks=operands.sinks)
    assert isinstance(out, torch.Tensor)
    return out.view(batch, q_len, heads, -1)
