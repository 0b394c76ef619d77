"""Batches that need a plan: every extend, and decode with a soft cap or in deterministic mode. Needs torch alone.

A step is planned once per kind of layer, by the first layer of that kind; the others run the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cute_attn.integrations.sglang.limits import ServerFacts
from cute_attn.integrations.sglang.metadata import LayerKind, Lengths
from cute_attn.integrations.sglang.tables import Operands
from cute_attn.integrations.step_plans import StepPlans
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
        @capture.lasting()
        def make(kind: LayerKind) -> BatchPrefillWithPagedKVCacheWrapper:
            buffers: Sequence[Any] = ()
            if captured is not None:
                count, indices = captured
                sizes = count + 1, count + 1, count
                qo, kv, last = (torch.zeros(n, dtype=torch.int32, device=workspace.device) for n in sizes)
                buffers = qo, kv, indices[kind.in_window_pool], last
            return BatchPrefillWithPagedKVCacheWrapper(workspace, server.layout, bool(buffers), *buffers)

        self.plans = StepPlans(make)
        self._server, self._decode = server, decode
        self._step: tuple[Lengths, Sequence[torch.Tensor]]

    @property
    def num_tokens(self) -> int:
        """Query tokens of the current step."""
        return self._step[0].num_tokens

    def begin(self, lengths: Lengths, indices: Sequence[torch.Tensor], kinds: Iterable[LayerKind] = ()) -> None:
        """Start a step. `indices`: page numbers in each pool. `kinds` are planned now, as captured launches need it,
        others by their first layer.
        """
        self._step = lengths, indices
        for kind in kinds:
            self._planned(kind)

    def run(self, layer: Operands) -> None:
        """Compute a layer's attention into `out`."""
        kind, q, kv, out, k_scale, v_scale, sinks = layer
        self._planned(kind).run(q, kv, k_scale=k_scale, v_scale=v_scale, out=out, sinks=sinks)

    def _planned(self, kind: LayerKind) -> Any:
        """Return a kind's wrapper, planned. A decode is a prefill of one token per request: in deterministic mode with
        the bits of longer ones; otherwise the plan promises that length, and selection treats it as a decode.
        """
        (lengths, indices), one_token = self._step, self._decode and not self._server.deterministic

        def plan(wrapper: Any) -> None:
            wrapper.plan(
                lengths.qo_indptr,
                lengths.kv_indptr,
                indices[kind.in_window_pool],
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

        return self.plans.of(kind, self._step, plan)
