"""Batches that need a plan: every extend, and decode with a soft cap or in deterministic mode. Needs torch alone.

A step is planned once per kind of layer, by the first layer of that kind; the others run the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from cute_attn.integrations.sglang.limits import ServerFacts
from cute_attn.integrations.sglang.metadata import LayerKind, Lengths
from cute_attn.integrations.sglang.tables import Operands
from cute_attn.prefill import BatchPrefillWithPagedKVCacheWrapper
from cute_attn.runtime import capture


class PlannedAttention:
    """Wrappers of one mode, one for each kind of layer.

    Parameters
    ----------
    workspace : uint8, `workspaces.BYTES`; wrappers that run one after another share it.
    server : its dtypes, layout and page size, and whether results must not depend on the rest of the batch.
    decode : one query token per request (True), or any number (False).
    captured : None, or of captured decodes the number of requests, and for each pool, by `LayerKind.in_window_pool`,
        where plans write page numbers: int32, with room for all pages of a batch.
    """

    def __init__(
        self,
        workspace: torch.Tensor,
        server: ServerFacts,
        decode: bool,
        captured: tuple[int, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self._workspace = workspace
        self._server = server
        self._decode = decode
        self._captured = captured
        self._wrappers: dict[LayerKind, BatchPrefillWithPagedKVCacheWrapper] = {}
        self._planned: set[LayerKind] = set()
        self._lengths: Lengths
        self._indices: Sequence[torch.Tensor]

    @property
    def num_tokens(self) -> int:
        """Query tokens of the current step."""
        return self._lengths.num_tokens

    def begin(self, lengths: Lengths, indices: Sequence[torch.Tensor], kinds: Iterable[LayerKind] = ()) -> None:
        """Start a step. `indices`: page numbers in each pool. `kinds` are planned now, as captured launches need it,
        others by their first layer.
        """
        self._lengths, self._indices = lengths, indices
        self._planned.clear()
        for kind in kinds:
            self._plan(kind)

    def run(self, layer: Operands) -> None:
        """Compute a layer's attention into `out`."""
        kind, q, kv, out, k_scale, v_scale, sinks = layer
        if kind not in self._planned:
            self._plan(kind)
        self._wrappers[kind].run(q, kv, k_scale=k_scale, v_scale=v_scale, out=out, sinks=sinks)

    def _plan(self, kind: LayerKind) -> None:
        """Plan a layer's wrapper. A decode is a prefill of one token per request: in deterministic mode with the bits
        of longer ones; otherwise the plan promises that length, and selection treats it as a decode.
        """
        if kind not in self._wrappers:
            self._wrappers[kind] = self._wrapper(kind.in_window_pool)
        lengths, one_token = self._lengths, self._decode and not self._server.deterministic
        self._wrappers[kind].plan(
            lengths.qo_indptr,
            lengths.kv_indptr,
            self._indices[kind.in_window_pool],
            lengths.last_page_len,
            kind.num_qo_heads,
            kind.num_kv_heads,
            kind.head_dim,
            self._server.page_size,
            causal=kind.causal and not one_token,
            window_left=kind.window_left,
            logits_soft_cap=kind.soft_cap,
            sm_scale=kind.sm_scale,
            q_data_type=self._server.dtype,
            kv_data_type=self._server.kv_dtype,
            disable_split_kv=self._server.deterministic,
            uniform_q_len=1 if one_token else None,
        )
        self._planned.add(kind)

    @capture.lasting()
    def _wrapper(self, in_window_pool: bool) -> BatchPrefillWithPagedKVCacheWrapper:
        place = self._workspace, self._server.layout
        if self._captured is None:
            return BatchPrefillWithPagedKVCacheWrapper(*place)
        count, indices = self._captured
        sizes = count + 1, count + 1, count
        qo, kv, last = (torch.zeros(n, dtype=torch.int32, device=self._workspace.device) for n in sizes)
        return BatchPrefillWithPagedKVCacheWrapper(*place, True, qo, kv, indices[in_window_pool], last)
