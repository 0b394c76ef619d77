"""SGLang's attention backend `cute_attn`: its hooks, its pools, its batches. Needs sglang.

Decode and the verification of drafts read page tables and lengths on the device; extends, and decode with a soft cap or
in deterministic mode, are planned once per step and kind of layer. Nothing of a pool is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode

from cute_attn.integrations.sglang.base import PagedBackend, drafts_of
from cute_attn.integrations.sglang.metadata import LayerKind, PageTables, as_pages, draft_mask
from cute_attn.integrations.sglang.steps import Operands, PlannedAttention, TableStep, attend
from cute_attn.integrations.workspaces import Workspaces
from cute_attn.runtime import capture


class CuteAttnBackend(PagedBackend):
    __doc__ = PagedBackend.__doc__

    verify_mask: VerifyMask | None = None  # where SGLang writes masks of drafts, with which layout

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        facts, rows = self._facts, model_runner.req_to_token_pool.req_to_token
        self.max_context_len: int = rows.shape[1]
        self._plans_decode = facts.deterministic or any(kind.soft_cap for kind in self._kinds.values())
        self.needs_cpu_seq_lens = self._plans_decode
        if self._window_pool is not None:
            self._pools.append(PageTables(rows, self.page_size, self._window_pool.translate_loc_from_full_to_swa))
        self._workspace, decode_workspace = Workspaces.on(self.device)
        self._layout = facts.layout
        self._by_table = functools.partial(
            attend, workspace=decode_workspace, layout=self._layout, max_context=self.max_context_len
        )
        self._planned = PlannedAttention(self._workspace, facts)
        self._window_loc: torch.Tensor | None = None  # where the step writes keys of sliding-window layers

    @functools.cached_property
    def _window_pool(self) -> Any:
        pool = self.token_to_kv_pool
        return pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None

    # ---- a step without a CUDA graph

    def _describe(self, batch: Any) -> TableStep | PlannedAttention:
        mode = batch.forward_mode
        if self._window_pool is not None and batch.out_cache_loc is not None:
            self._window_loc = self._window_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        if mode.is_target_verify():
            step, visible = self._table_step(batch), batch.spec_info.custom_mask
            if not self._facts.draft_trees or visible is None:
                return step
            mask = draft_mask(visible, batch.seq_lens, step.q_len, self._mask_has_prefix(batch.spec_info))
            return step._replace(mask=mask)
        if not mode.is_decode():
            return self._begin_extend(batch)
        if self._plans_decode:
            return self._begin_decode(batch)
        return self._table_step(batch)

    def _begin_extend(self, batch: Any) -> PlannedAttention:
        extended, cached = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        if extended is None or cached is None:  # batches that SGLang pads on the device alone: a synchronisation
            extended, cached = batch.extend_seq_lens.tolist(), batch.extend_prefix_lens.tolist()
        kv_lens = [new + old for new, old in zip(extended, cached, strict=True)]
        return self._planned.begin(self._pools, batch.req_pool_indices, batch.seq_lens, extended, kv_lens)

    def _begin_decode(self, batch: Any, captured: Collection[LayerKind] | None = None) -> PlannedAttention:
        requests, seq_lens, kv_lens = batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu
        if kv_lens is None:
            kv_lens = seq_lens.cpu()  # SGLang keeps the host's copy for backends with `needs_cpu_seq_lens`
        return self._planned.begin(self._pools, requests, seq_lens, [1] * len(kv_lens), kv_lens, True, captured)

    # ---- CUDA graphs

    @capture.lasting()
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured batches of up to `max_bs` requests and `max_num_tokens` query tokens read."""
        if self._plans_decode:
            sizes = [max_bs * pool.max_pages for pool in self._pools]
            self._planned.captured_indices = [torch.zeros(n, dtype=torch.int32, device=self.device) for n in sizes]
        else:
            super().init_cuda_graph_state(max_bs, max_num_tokens)
        if self._window_pool is not None:
            self._graph_window_loc = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)
        drafts = get_spec().speculative_num_draft_tokens
        if drafts:
            mode = TreeMaskMode.QLEN_ONLY
            cells = tree_mask_numel(mode, max_bs, drafts, self.max_context_len)
            buffer = torch.zeros(cells, dtype=torch.bool, device=self.device)
            self.verify_mask = VerifyMask(buffer, mode, max_bs, is_read=self._facts.draft_trees)

    def _graph_step(self, batch: Any) -> TableStep | PlannedAttention:
        """Return the description of a captured batch: with plans, and masks, whose addresses change."""
        batch_size, q_len = batch.batch_size, max(drafts_of(batch), 1)
        if self._plans_decode:
            return self._begin_decode(batch, set(self._kinds.values()))
        assert self._graph_tables is not None
        branching = q_len > 1 and self._facts.draft_trees
        if branching:
            visible, has_prefix = batch.spec_info.custom_mask, self._mask_has_prefix(batch.spec_info)
            self._graph_tables.set_mask(visible, batch.seq_lens, q_len, has_prefix)
        return self._graph_tables.view(batch_size, q_len, branching)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Write page tables, lengths and slots on the device; captured and replayed with the model."""
        super().init_forward_metadata_in_graph(forward_batch)
        if self._window_pool is not None:
            loc = forward_batch.out_cache_loc
            self._window_loc = self._graph_window_loc[: len(loc)]
            self._window_loc.copy_(self._window_pool.translate_loc_from_full_to_swa(loc))

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Take over a mask of drafts that was not known when the step was described."""
        step = self.forward_metadata
        if not self._facts.draft_trees or not isinstance(step, TableStep) or step.mask is None:
            return
        seq_lens = step.seq_lens - step.q_len
        draft_mask(spec_info.custom_mask, seq_lens, step.q_len, self._mask_has_prefix(spec_info), out=step.mask)

    def _mask_has_prefix(self, spec_info: Any) -> bool:
        """Tell whether rows of a mask begin with the keys before the drafts: n-gram drafts ignore `verify_mask`."""
        if self.verify_mask is not None and type(spec_info).__name__ != "NgramVerifyInput":
            return False
        return default_tree_mask_mode() == TreeMaskMode.FULL_MASK

    # ---- a layer

    def _attend(self, layer: RadixAttention, new: Operands, saved_with: Any) -> None:
        pool, step = self.token_to_kv_pool, self.forward_metadata
        if saved_with is not None:
            location = KVWriteLoc.for_batch(saved_with, swa_loc=self._window_loc)
            pool.set_kv_buffer(layer, location, *new.kv, layer.k_scale, layer.v_scale)
        k, v = (as_pages(x, self.page_size, self._layout) for x in pool.get_kv_buffer(layer.layer_id))
        k_scale, v_scale = self._scales(layer)
        operands = new._replace(kv=(k, v), k_scale=k_scale, v_scale=v_scale)
        if isinstance(step, TableStep):
            self._by_table(step, operands)
        else:
            step.run(operands)

    def _kind(self, layer: RadixAttention) -> LayerKind:
        pool = self._window_pool
        return LayerKind.of(layer, pool is not None and pool.layers_mapping[layer.layer_id][1])
