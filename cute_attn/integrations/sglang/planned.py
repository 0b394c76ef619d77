"""Batches that need a plan: every extend, and decode with a soft cap or in deterministic mode. Needs torch alone.

A step is planned once per kind of layer, by the first layer of that kind; the others run the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from cute_attn.decode import BatchDecodeWithPagedKVCacheWrapper
from cute_attn.integrations.sglang.metadata import LayerKind, Lengths
from cute_attn.prefill import BatchPrefillWithPagedKVCacheWrapper

WORKSPACE_BYTES = 128 << 20  # enough for every batch whose splits the plan chooses

Wrapper = BatchPrefillWithPagedKVCacheWrapper | BatchDecodeWithPagedKVCacheWrapper
Scale = float | torch.Tensor | None


class CacheFormat(NamedTuple):
    """What all layers of a server share."""

    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    layout: str  # "NHD" | "HND"
    page_size: int
    deterministic: bool  # results of a request must not depend on the rest of the batch


class GraphBuffers(NamedTuple):
    """Index buffers that captured decode launches of one batch size read; plans fill them."""

    qo_indptr: torch.Tensor  # int32 [batch_size + 1]
    indptr: torch.Tensor  # int32 [batch_size + 1]
    indices: torch.Tensor  # int32, room for all pages of the batch
    last_page_len: torch.Tensor  # int32 [batch_size]


class Step(NamedTuple):
    """The batch that is planned."""

    lengths: Lengths
    page_indices: Callable[[bool], torch.Tensor]  # by whether they are those of the pool of sliding-window layers


class PlannedAttention:
    """Wrappers of one mode, one for each kind of layer.

    Parameters
    ----------
    workspace : uint8, `WORKSPACE_BYTES`; wrappers that run one after another share it.
    format : dtypes, layout and page size of the server.
    decode : one query token per request (True), or any number (False).
    graph_buffers : None, or for captured decode the buffers of a pool, by whether it is that of sliding-window layers.
    """

    def __init__(
        self,
        workspace: torch.Tensor,
        format: CacheFormat,
        decode: bool,
        graph_buffers: Callable[[bool], GraphBuffers] | None = None,
    ) -> None:
        self._workspace = workspace
        self._format = format
        self._decode = decode
        self._graph_buffers = graph_buffers
        self._wrappers: dict[LayerKind, Wrapper] = {}
        self._planned: set[LayerKind] = set()
        self._step: Step | None = None
        self._indices: dict[bool, torch.Tensor] = {}

    @property
    def num_tokens(self) -> int:
        """Query tokens of the current step."""
        assert self._step is not None
        return self._step.lengths.num_tokens

    def begin(self, step: Step, kinds: Iterable[LayerKind] = ()) -> None:
        """Start a step. `kinds` are planned now, as captured launches need it, others by their first layer."""
        self._step = step
        self._planned.clear()
        self._indices.clear()
        for kind in kinds:
            self._plan(kind)

    def run(
        self,
        kind: LayerKind,
        q: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        k_scale: Scale,
        v_scale: Scale,
        sinks: torch.Tensor | None,
    ) -> None:
        """Compute a layer's attention into `out`, `[num_tokens, heads, head_dim]` like q."""
        if kind not in self._planned:
            self._plan(kind)
        self._wrappers[kind].run(q, kv_cache, k_scale=k_scale, v_scale=v_scale, out=out, sinks=sinks)

    def _plan(self, kind: LayerKind) -> None:
        assert self._step is not None
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            wrapper = self._wrappers[kind] = self._new_wrapper(kind)
        if isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper):
            self._plan_decode(wrapper, kind, self._step.lengths)
        else:
            self._plan_extend(wrapper, kind, self._step.lengths)
        self._planned.add(kind)

    def _new_wrapper(self, kind: LayerKind) -> Wrapper:
        """Return a wrapper of the mode. In deterministic mode a decode is a prefill of one token, with its bits."""
        place, buffers = (self._workspace, self._format.layout), None
        if self._graph_buffers is not None:
            buffers = self._graph_buffers(kind.in_window_pool)
        if not self._decode or self._format.deterministic:
            return BatchPrefillWithPagedKVCacheWrapper(*place, buffers is not None, *(buffers or ()))
        return BatchDecodeWithPagedKVCacheWrapper(*place, buffers is not None, False, *(buffers or (None,))[1:])

    def _page_indices(self, in_window_pool: bool) -> torch.Tensor:
        assert self._step is not None
        if in_window_pool not in self._indices:
            self._indices[in_window_pool] = self._step.page_indices(in_window_pool)
        return self._indices[in_window_pool]

    def _plan_decode(self, wrapper: BatchDecodeWithPagedKVCacheWrapper, kind: LayerKind, lengths: Lengths) -> None:
        wrapper.plan(lengths.kv_indptr, *self._pages_and_heads(kind, lengths), **self._options(kind))

    def _plan_extend(self, wrapper: BatchPrefillWithPagedKVCacheWrapper, kind: LayerKind, lengths: Lengths) -> None:
        pages_and_heads = self._pages_and_heads(kind, lengths)
        wrapper.plan(lengths.qo_indptr, lengths.kv_indptr, *pages_and_heads, causal=kind.causal, **self._options(kind))

    def _pages_and_heads(
        self, kind: LayerKind, lengths: Lengths
    ) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
        """Return the arguments of a plan behind its indptrs."""
        pages = self._page_indices(kind.in_window_pool), lengths.last_page_len
        return *pages, kind.num_qo_heads, kind.num_kv_heads, kind.head_dim, self._format.page_size

    def _options(self, kind: LayerKind) -> dict[str, Any]:
        """Return the options that plans of decode and of extends share."""
        return {
            "window_left": kind.window_left,
            "logits_soft_cap": kind.soft_cap,
            "sm_scale": kind.sm_scale,
            "q_data_type": self._format.q_dtype,
            "kv_data_type": self._format.kv_dtype,
            "disable_split_kv": self._format.deterministic,
        }
