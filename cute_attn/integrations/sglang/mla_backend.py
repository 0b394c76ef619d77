"""SGLang's attention backend `cute_attn` for models with latent attention (MLA). Needs sglang.

SGLang's models decide: extends without a cached prefix come with decompressed keys and values, all others, decodes and
verification of drafts with absorbed queries. Lengths and page tables stay on the device; nothing of a pool is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from cute_attn.integrations.sglang import limits
from cute_attn.integrations.sglang.backend import check_mode, most_keys, refuse_arguments, server_facts
from cute_attn.integrations.sglang.latent import LatentAttention, Step, extend_step
from cute_attn.integrations.sglang.limits import FP8_DTYPES, layer_facts
from cute_attn.integrations.sglang.metadata import LayerKind, PageTables, as_pages
from cute_attn.integrations.sglang.tables import GraphTables, TableStep
from cute_attn.runtime import capture


class CuteAttnMLABackend(AttentionBackend):
    """Latent attention on cute_attn's kernels over SGLang's pool of latent rows.

    Parameters
    ----------
    model_runner : SGLang's ModelRunner, its model loaded and its pools allocated.

    Raises
    ------
    NotSupported (a NotImplementedError) that lists every setting of the server and of the model that is refused.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size: int = model_runner.page_size
        self.device = model_runner.device
        facts = server_facts(model_runner)
        layers = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
        limits.check(facts, map(layer_facts, layers))
        self._scaled = facts.kv_dtype in FP8_DTYPES
        self._kinds = {layer: LayerKind.of(layer) for layer in layers}
        self._pages = PageTables(model_runner.req_to_token_pool.req_to_token, self.page_size)
        self._attention = LatentAttention(self.device)
        self._graph_tables: GraphTables | None = None
        self.forward_metadata: Step | None = None

    # ---- a step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe the batch of the next forward pass."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.forward_metadata = None
            return
        check_mode(forward_batch)
        longest, seq_lens, q_len = most_keys(forward_batch), forward_batch.seq_lens, 1
        if mode.is_target_verify():
            q_len = forward_batch.spec_info.draft_token_num
            longest, seq_lens = None if longest is None else longest + q_len, seq_lens + q_len
        pages = None if longest is None else -(-longest // self.page_size)
        tables = self._pages.block_tables(forward_batch.req_pool_indices, pages)
        if mode.is_decode() or mode.is_target_verify():
            self.forward_metadata = TableStep(tables, None, seq_lens.to(torch.int32), q_len)
            return
        q_lens = forward_batch.extend_seq_lens_cpu
        if q_lens is None:  # batches that SGLang pads on the device alone: a synchronisation
            q_lens = forward_batch.extend_seq_lens.tolist()
        self.forward_metadata = extend_step(tables, seq_lens, list(q_lens))

    @capture.lasting()
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured batches of up to `max_bs` requests read."""
        self._graph_tables = GraphTables(max_bs, self._pages, None, self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that pad a captured batch."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a capture or a replay of decode or of verification."""
        check_mode(forward_batch)
        assert self._graph_tables is not None
        verifies = forward_batch.forward_mode.is_target_verify()
        q_len = forward_batch.spec_info.draft_token_num if verifies else 1
        self.forward_metadata = self._graph_tables.view(forward_batch.batch_size, q_len, False)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Write page tables and lengths on the device; captured and replayed with the model."""
        assert self._graph_tables is not None
        size, verifies = forward_batch.batch_size, forward_batch.forward_mode.is_target_verify()
        drafts = forward_batch.spec_info.draft_token_num if verifies else 0
        self._graph_tables.fill(forward_batch.req_pool_indices[:size], forward_batch.seq_lens[:size], drafts)

    # ---- a layer

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention of new tokens, or of drafts.

        Parameters
        ----------
        q : `[tokens, heads * 576]`, absorbed, or `[tokens, heads * 192]`. Rows past the batch's tokens, which pad it,
            have output 0.
        k, v : rows of the pool, written if `save_kv_cache`, or keys and values of every head.
        kwargs : refused unless None or False.

        Returns
        -------
        `[tokens, heads * 512]`, or `[tokens, heads * 128]`.
        """
        refuse_arguments(kwargs)
        kind, step = self._kinds[layer], self.forward_metadata
        assert step is not None, "init_forward_metadata describes a batch before its first layer"
        q = q.view(-1, kind.num_qo_heads, kind.head_dim)
        out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        rows, tokens = len(q), step.num_tokens
        out[tokens:].zero_()
        if (kind.head_dim, layer.v_head_dim) != limits.ABSORBED:
            assert k is not None
            assert v is not None
            new = q[:tokens], k[:tokens], v[:tokens]
            self._attention.run_new(step, kind, new, out[:tokens])
            return out.view(rows, -1)
        scale: float | torch.Tensor | None = None
        if self._scaled:
            scale = layer.k_scale if layer.k_scale_float is None else layer.k_scale_float
        if save_kv_cache and k is not None:
            row = k if scale is None else k / scale
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), row, v)
        cache = as_pages(self.token_to_kv_pool.get_key_buffer(layer.layer_id)[:, 0], self.page_size, "NHD")
        self._attention.run_rows(step, kind, q[:tokens], cache, out[:tokens], scale)
        return out.view(rows, -1)

    forward_decode = forward_extend
