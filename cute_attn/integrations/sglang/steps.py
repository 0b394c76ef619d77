"""Batches as they are computed: by page tables on the device, without a plan, which is decode and the verification of
drafts; and by plans, which is every extend, and decode with a soft cap or in deterministic mode. Needs torch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.decode import xqa_batch_decode_with_kv_cache
from cute_attn.integrations.latent import LatentDecodes
from cute_attn.integrations.sglang.limits import ServerFacts
from cute_attn.integrations.sglang.metadata import WORD_BITS, LayerKind, PageTables, Scale, draft_mask
from cute_attn.integrations.step_plans import StepPlans
from cute_attn.prefill import BatchPrefillWithPagedKVCacheWrapper
from cute_attn.request.index_arrays import bounds, int32, last_page_len
from cute_attn.runtime import capture

# ---- by page tables


class TableStep(NamedTuple):
    """A batch whose requests have the same number of query tokens each, or with `starts` any number."""

    tables: Sequence[torch.Tensor]  # of each pool, by `LayerKind.in_window_pool`: int32 [batch_size, max_pages]
    seq_lens: torch.Tensor  # int32 [batch_size], the query tokens' own keys included
    q_len: int = 1  # with `starts` the most of any request
    mask: torch.Tensor | None = None  # of drafts that branch; None: causal
    starts: torch.Tensor | None = None  # int32 [batch_size + 1], where the query tokens of each request begin
    starts_cpu: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return self.seq_lens.numel() * self.q_len if self.starts_cpu is None else int(self.starts_cpu[-1])

    def extended(self, q_lens: list[int]) -> TableStep:
        """Return a batch as one of extends. `q_lens`: new tokens of each request, which its `seq_lens` count."""
        starts = int32(bounds(np.asarray(q_lens, np.int64)))
        on_device = starts
        if self.seq_lens.is_cuda:
            on_device = starts.pin_memory().to(self.seq_lens.device, non_blocking=True)
        return self._replace(q_len=max(q_lens), starts=on_device, starts_cpu=starts)

    def latent(self, workspace: torch.Tensor) -> LatentDecodes:
        """Return the batch as latent attention over the pool's rows takes it."""
        where = self.tables[0], self.seq_lens, self.starts
        return LatentDecodes(self.num_tokens, self.q_len, *where, workspace)


class Operands(NamedTuple):
    """The tensors of a layer; those of tokens are without the rows that pad a batch."""

    kind: LayerKind
    q: torch.Tensor  # [num_tokens, heads, head_dim]
    kv: tuple[Any, Any]  # keys and values: pages of the pool
    out: torch.Tensor  # written; like q
    k_scale: Scale = None
    v_scale: Scale = None
    sinks: torch.Tensor | None = None


def attend(step: TableStep, layer: Operands, *, workspace: torch.Tensor, layout: str, max_context: int) -> None:
    """Compute a layer's attention into `out`.

    `workspace`: uint8, `workspaces.DECODE_BYTES`, zeros. `layout`: "NHD" or "HND", of the pool. `max_context`: an upper
    bound of the keys of a request.
    """
    kind, q, kv, out, k_scale, v_scale, sinks = layer
    xqa_batch_decode_with_kv_cache(
        q,
        kv,
        workspace,
        step.tables[kind.in_window_pool],
        step.seq_lens,
        max_context,
        kind.sm_scale if k_scale is None else kind.sm_scale * k_scale,
        1.0 if v_scale is None else v_scale,
        kind.window_left,
        out=out,
        sinks=sinks,
        kv_layout=layout,
        q_len_per_req=step.q_len,
        mask=step.mask,
    )


class GraphTables:
    """The buffers of a captured batch, whose addresses stay: page tables, lengths, masks.

    `fill` is made of operations that a CUDA graph records; `set_mask` reads a mask whose address changes with every
    batch, and runs before a replay.
    """

    @capture.lasting()
    def __init__(self, max_batch: int, pools: Sequence[PageTables], device: torch.device | str) -> None:
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        self._pools = pools
        self._tables = [zeros((max_batch, pool.max_pages)) for pool in pools]
        self._seq_lens = zeros(max_batch)
        self._masks: dict[int, torch.Tensor] = {}  # by draft tokens per request

    def view(self, batch_size: int, q_len: int, with_mask: bool) -> TableStep:
        """Return the buffers of the first requests. Entries are those of the latest `fill` and `set_mask`."""
        mask = self._mask(q_len)[: batch_size * q_len] if with_mask else None
        return TableStep([x[:batch_size] for x in self._tables], self._seq_lens[:batch_size], q_len, mask)

    def fill(self, requests: torch.Tensor, seq_lens: torch.Tensor, drafts: int) -> None:
        """Write tables and lengths of a batch; `drafts` query tokens per request are added to its `seq_lens`."""
        batch_size = len(requests)
        for pool, tables in zip(self._pools, self._tables, strict=True):
            pool.block_tables(requests, out=tables[:batch_size])
        torch.add(seq_lens, drafts, out=self._seq_lens[:batch_size])

    def set_mask(self, visible: torch.Tensor, seq_lens: torch.Tensor, q_len: int, with_prefix: bool) -> None:
        """Write the mask of drafts; arguments as for `metadata.draft_mask`."""
        draft_mask(visible, seq_lens, q_len, with_prefix, out=self._mask(q_len)[: len(seq_lens) * q_len])

    @capture.lasting()
    def _mask(self, q_len: int) -> torch.Tensor:
        if q_len not in self._masks:
            rows = len(self._seq_lens) * q_len
            self._masks[q_len] = self._seq_lens.new_zeros(rows, -(-q_len // WORD_BITS))
        return self._masks[q_len]


# ---- by plans


class PlannedAttention:
    """Wrappers, one for each kind of layer and form of batch, planned by the first layer of that kind in a step.

    Parameters
    ----------
    workspace : uint8, `workspaces.BYTES`; wrappers that run one after another share it.
    server : its dtypes, layout and page size, and whether results must not depend on the rest of the batch.
    """

    def __init__(self, workspace: torch.Tensor, server: ServerFacts) -> None:
        self.plans = StepPlans(self._wrapper)
        self._workspace, self._server = workspace, server
        # Where plans of captured decodes write page numbers of each pool, by `LayerKind.in_window_pool`: int32, with
        # room for all pages of a batch.
        self.captured_indices: Sequence[torch.Tensor] = ()
        self.num_tokens = 0  # query tokens of the current step
        self._step: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # index arrays; page numbers in each pool
        self._form: tuple[bool, int]  # of its batch: decode, and if it is captured the number of requests

    @capture.lasting()
    def _wrapper(self, key: tuple[LayerKind, bool, int]) -> BatchPrefillWithPagedKVCacheWrapper:
        kind, _, captured = key
        buffers: Sequence[Any] = ()
        if captured:
            sizes = captured + 1, captured + 1, captured
            qo, kv, last = (torch.zeros(n, dtype=torch.int32, device=self._workspace.device) for n in sizes)
            buffers = qo, kv, self.captured_indices[kind.in_window_pool], last
        return BatchPrefillWithPagedKVCacheWrapper(self._workspace, self._server.layout, captured > 0, *buffers)

    def begin(
        self,
        pools: Sequence[PageTables],
        requests: torch.Tensor,
        seq_lens: torch.Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int] | torch.Tensor,
        decode: bool = False,
        captured: Collection[LayerKind] | None = None,
    ) -> PlannedAttention:
        """Start a step and return this.

        `requests`, `seq_lens`: rows of the tables of `pools` and keys of each request, on the device. `q_lens`,
        `kv_lens`: query tokens and keys, these included, on the host. `decode`: one query token per request.
        `captured`: of a captured batch the kinds of layers whose launches need plans now; others are planned by their
        first layer.
        """
        kv, page_size = np.asarray(kv_lens, np.int64), self._server.page_size
        pages = -(-kv // page_size)
        starts, kv_indptr = bounds(np.asarray(q_lens, np.int64)), bounds(pages)
        arrays = [int32(x) for x in (starts, kv_indptr, last_page_len(kv, pages, page_size))]
        self.num_tokens, num_pages = int(starts[-1]), int(kv_indptr[-1])
        self._step = arrays, [pool.page_indices(requests, seq_lens, num_pages) for pool in pools]
        self._form = decode, 0 if captured is None else len(starts) - 1
        for kind in captured or ():
            self._planned(kind)
        return self

    def run(self, layer: Operands) -> None:
        """Compute a layer's attention into `out`."""
        kind, q, kv, out, k_scale, v_scale, sinks = layer
        self._planned(kind).run(q, kv, k_scale=k_scale, v_scale=v_scale, out=out, sinks=sinks)

    def _planned(self, kind: LayerKind) -> Any:
        """Return a kind's wrapper, planned. A decode is a prefill of one token per request: in deterministic mode with
        the bits of longer ones; otherwise the plan promises that length, and selection treats it as a decode.
        """
        (qo_indptr, kv_indptr, last), indices = self._step
        one_token = self._form[0] and not self._server.deterministic

        def plan(wrapper: Any) -> None:
            wrapper.plan(
                qo_indptr,
                kv_indptr,
                indices[kind.in_window_pool],
                last,
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

        return self.plans.of((kind, *self._form), self._step, plan)
