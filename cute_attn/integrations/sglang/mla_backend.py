"""SGLang's attention backend `cute_attn` for models with latent attention (MLA). Needs sglang.

SGLang's models decide: extends without a cached prefix come with decompressed keys and values, all others, decodes and
verification of drafts with absorbed queries. Lengths and page tables stay on the device; nothing of a pool is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from cute_attn.integrations import latent, workspaces
from cute_attn.integrations.latent import LatentPrefills
from cute_attn.integrations.sglang import limits
from cute_attn.integrations.sglang.base import PagedBackend, refuse_arguments
from cute_attn.integrations.sglang.metadata import as_pages
from cute_attn.integrations.sglang.steps import Operands, TableStep


class CuteAttnMLABackend(PagedBackend):
    __doc__ = PagedBackend.__doc__

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._workspace = torch.empty(workspaces.BYTES, dtype=torch.uint8, device=self.device)
        self._prefills = LatentPrefills(self._workspace)

    def _describe(self, batch: Any) -> TableStep:
        step = self._table_step(batch)
        if batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify():
            return step
        q_lens = batch.extend_seq_lens_cpu
        if q_lens is None:  # batches that SGLang pads on the device alone: a synchronisation
            q_lens = batch.extend_seq_lens.tolist()
        return step.extended(list(q_lens))

    # ---- a layer

    def _attend(self, layer: Any, new: Operands, saved_with: Any) -> None:
        refuse_arguments({"sinks": new.sinks})
        (k, v), q, kind, step = new.kv, new.q, new.kind, self.forward_metadata
        if (kind.head_dim, layer.v_head_dim) != limits.ABSORBED:
            assert step.starts_cpu is not None, "SGLang decompresses keys in extends only"
            self._prefills.run(step.starts_cpu, (q, k[: len(q)], v[: len(q)]), kind.sm_scale, new.out)
            return
        scale, _ = self._scales(layer)
        if saved_with is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc.for_batch(saved_with), k if scale is None else k / scale, v
            )
        cache = as_pages(self.token_to_kv_pool.get_key_buffer(layer.layer_id)[:, 0], self.page_size, "NHD")
        decodes = step.latent(self._workspace)
        latent.decode(q, cache, decodes, kind.sm_scale, 1.0 if scale is None else scale, out=new.out)
