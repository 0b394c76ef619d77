"""SGLang's attention backend `cute_attn` for models with latent attention (MLA). Needs sglang.

SGLang's models decide: extends without a cached prefix come with decompressed keys and values, all others, decodes and
verification of drafts with absorbed queries. Lengths and page tables stay on the device; nothing of a pool is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from cute_attn.integrations.sglang import limits
from cute_attn.integrations.sglang.base import PagedBackend, refuse_arguments
from cute_attn.integrations.sglang.latent import LatentAttention, extended
from cute_attn.integrations.sglang.metadata import as_pages
from cute_attn.integrations.sglang.tables import TableStep


class CuteAttnMLABackend(PagedBackend):
    __doc__ = PagedBackend.__doc__

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._attention = LatentAttention(self.device)

    def _describe(self, batch: Any) -> TableStep:
        step = self._table_step(batch)
        if batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify():
            return step
        q_lens = batch.extend_seq_lens_cpu
        if q_lens is None:  # batches that SGLang pads on the device alone: a synchronisation
            q_lens = batch.extend_seq_lens.tolist()
        return extended(step, list(q_lens))

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
        kind = self._kinds[layer]
        q = q.view(-1, kind.num_qo_heads, kind.head_dim)
        out, step = self._outputs(q, layer.v_head_dim), self.forward_metadata
        rows, tokens = len(q), step.num_tokens
        if (kind.head_dim, layer.v_head_dim) != limits.ABSORBED:
            assert k is not None
            assert v is not None
            new = q[:tokens], k[:tokens], v[:tokens]
            self._attention.run_new(step, kind, new, out[:tokens])
            return out.view(rows, -1)
        scale, _ = self._scales(layer)
        if save_kv_cache and k is not None:
            row = k if scale is None else k / scale
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), row, v)
        cache = as_pages(self.token_to_kv_pool.get_key_buffer(layer.layer_id)[:, 0], self.page_size, "NHD")
        self._attention.run_rows(step, kind, q[:tokens], cache, out[:tokens], scale)
        return out.view(rows, -1)

    forward_decode = forward_extend
