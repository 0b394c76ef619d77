"""The attention of a layer as vLLM calls it."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from cute_attn.integrations.vllm.attention import EncoderAttention, LayerAttention, has_standard_slopes
from cute_attn.integrations.vllm.metadata import StepMetadata
from cute_attn.integrations.vllm.support import Layer

ENCODERS = AttentionType.ENCODER, AttentionType.ENCODER_ONLY


class CuteAttnImpl(AttentionImpl):
    """Self-attention and cross attention of decoders over the paged cache, and self-attention of encoders. vLLM makes
    one per layer.

    Parameters are vLLM's, in its order; `sinks` (floating-point `[num_heads]`, natural-log domain) by keyword.
    NotImplementedError for ALiBi slopes that are not the standard ones, and what no kernel of the GPU
    supports, with the reason.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if sinks is not None and sinks.numel() != num_heads:
            raise ValueError(f"sinks must have {num_heads} elements, one per head, got shape {tuple(sinks.shape)}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = None if sliding_window is None else (sliding_window - 1, 0)
        self.logits_soft_cap = logits_soft_cap
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        layer = Layer(
            num_heads,
            head_size,
            self.scale,
            self.num_kv_heads,
            kv_cache_dtype,
            window_left=-1 if sliding_window is None else sliding_window - 1,
            soft_cap=logits_soft_cap or 0.0,
            alibi=has_standard_slopes(alibi_slopes, num_heads),
            sinks=sinks is not None,
        )
        self.attention: LayerAttention | EncoderAttention
        if attn_type in ENCODERS:
            self.attention = EncoderAttention(layer, envs.VLLM_BATCH_INVARIANT)
            return
        capability = current_platform.get_device_capability()
        self.attention = LayerAttention(
            layer,
            get_current_vllm_config().model_config.dtype,
            None if capability is None else (capability.major, capability.minor),
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks as float32, which kernels read: once, not in every step. Again after new weights."""
        if self.sinks is None:
            return
        if self.attention.sinks is None:
            self.attention.sinks = self.sinks.to(torch.float32)
        else:
            self.attention.sinks.copy_(self.sinks)  # captured graphs keep its address

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the step's attention into `output` and return it.

        `query` and `output` are `[tokens, num_heads, head_size]`. Keys and values are read from `kv_cache`, into which
        `do_kv_cache_update`, or the layer that this one shares a cache with, has written them. Without metadata, which
        is a profiling run, the output is 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantised output is not supported: output_scale and output_block_scale")
        if attn_metadata is None:
            return output.fill_(0)
        if isinstance(self.attention, EncoderAttention):
            assert key is not None
            assert value is not None
            self.attention.run(query, key, value, attn_metadata, output)
            return output
        scales = layer._k_scale_float, layer._v_scale_float
        clamps_ranges = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        self.attention.run(query, kv_cache, attn_metadata, output, *scales, clamps_ranges)
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values `[tokens, num_kv_heads, head_size]` to the slots; rows of slots < 0 are padding."""
        if isinstance(self.attention, LayerAttention):  # encoders have no cache
            self.attention.write(key, value, kv_cache, slot_mapping, (layer._k_scale, layer._v_scale))
