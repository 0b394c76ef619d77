"""vLLM's metadata builder: from the batch of a step to what the layers of a KV cache group share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from cute_attn.integrations.vllm.attention import EncoderAttention
from cute_attn.integrations.vllm.impl import CuteAttnImpl
from cute_attn.integrations.vllm.metadata import Batch, Sessions, StepMetadata, split_decodes, workspaces


class CuteAttnMetadataBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Builds a step's metadata: a few slices. Plans are made by the layers that need them.

    Requests of up to 1 + num_speculative_tokens query tokens are decodes, which vLLM puts first.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._sessions = Sessions(workspaces(vllm_config, device))
        self._speculates = vllm_config.speculative_config is not None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return UNIFORM_BATCH: decodes with equally many query tokens. NEVER for encoders, whose plans need lengths on
        the host, and where decode needs a plan and the older model runner of vLLM captures, whose warm-up does not say
        that a capture follows.
        """
        layers = vllm_config.compilation_config.static_forward_context.values()
        impls = [impl for layer in layers if isinstance(impl := getattr(layer, "impl", None), CuteAttnImpl)]
        if any(isinstance(impl.attention, EncoderAttention) for impl in impls):
            return AttentionCGSupport.NEVER
        if getattr(vllm_config, "use_v2_model_runner", False):
            return AttentionCGSupport.UNIFORM_BATCH
        planned = any(impl.attention.plans_decode for impl in impls)
        return AttentionCGSupport.NEVER if planned else AttentionCGSupport.UNIFORM_BATCH

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepMetadata:
        """Return the metadata of a step that warms up or captures a CUDA graph."""
        return dataclasses.replace(self.build(0, common_attn_metadata), for_capture=True)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:
        """Return the metadata of a step. `common_prefix_len` is always 0, and `fast_build` makes no difference."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                f"causal must be one bool for all requests, got {common.causal!r}: kernels need a mask per request"
            )
        decodes = split_decodes(
            common.query_start_loc_cpu,
            common.num_reqs,
            common.num_actual_tokens,
            common.max_query_len,
            self.reorder_batch_threshold if common.causal else 1,
        )
        # vLLM's bound is the length of every request, except of those that verify drafts.
        exact: Any = True
        if self._speculates:
            exact = False if common.is_prefilling is None else common.is_prefilling
        batch = Batch(
            common.num_reqs,
            common.num_actual_tokens,
            common.query_start_loc,
            common.query_start_loc_cpu,
            common.seq_lens,
            common.block_table_tensor,
            common.seq_lens_cpu_upper_bound,
            exact,
            gpu_sync_allowed,
        )
        return StepMetadata(batch, decodes, self._sessions, common.causal, mm_prefix_range=common.mm_req_doc_ranges)
