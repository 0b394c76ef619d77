"""The backend as vLLM's registry names it: what it supports, and its classes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

from cute_attn.integrations.vllm import NAME, support
from cute_attn.integrations.vllm.builder import CuteAttnMetadataBuilder
from cute_attn.integrations.vllm.impl import CuteAttnImpl
from cute_attn.integrations.vllm.support import Layer
from cute_attn.request.settings import HALF


class OnKernels:
    """What holds for both of vLLM's kinds of backends, as the kernels are the same."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return multiples of 16. Kernels take any page size, but a block of so few tokens has too many pages."""
        return [MultipleOf(16)]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: how many query tokens a request has is read on the host."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether some kernel runs on the GPU."""
        return support.compute_capability_reason(capability.major, capability.minor) is None

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why no kernel of the GPU supports the combination, or None."""
        if use_mm_prefix and envs.VLLM_BATCH_INVARIANT:
            return "batch invariance with images whose tokens see each other: steps without images run another kernel"
        if use_mla:
            return support.cache_reason(kv_cache_dtype or "auto", dtype)
        layer = Layer(8, head_size, 1.0, 8, kv_cache_dtype or "auto", sinks=has_sink)  # no answer depends on the heads
        return support.reason(layer, dtype, (device_capability.major, device_capability.minor))


class CuteAttnBackend(OnKernels, AttentionBackend):
    """Decoder self-attention on cute_attn's kernels. What is not supported is refused with a reason when vLLM
    validates its configuration: MLA, sparse attention, context parallelism.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(HALF)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(support.STORED)
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True  # `forward` reads the cache only

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM's registry has the backend."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[CuteAttnImpl]:
        """Return the class of a layer's attention."""
        return CuteAttnImpl

    @staticmethod
    def get_builder_cls() -> type[CuteAttnMetadataBuilder]:
        """Return the class that builds the metadata of a step."""
        return CuteAttnMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layouts in which a layer is compact: decode counts a layer's span in 32 bits of 16 bytes."""
        return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec of an NVFP4 cache with packed values and block scales; others as they are."""
        if not spec.kv_quant_mode.is_nvfp4 or spec.state_content_bytes is not None:
            return spec
        if spec.head_size != spec.head_size_v:
            raise NotImplementedError(
                f"NVFP4 caches must have keys and values of one head size, got {spec.head_size} and {spec.head_size_v}"
            )
        content = (spec.head_size // 2 + spec.head_size // 16) * spec.dtype.itemsize
        return dataclasses.replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)

    @classmethod
    def _supported(cls, attn_type: str = "") -> bool:
        return True

    supports_sink = supports_sliding_window = _supported
    supports_attn_type = _supported  # decoders, cross attention over a decoder's cache, and encoders, which have none
    supports_non_causal = _supported  # tokens that see all keys of their request
    supports_mm_prefix = _supported  # the tokens of an image see each other, in kernels that read each token's range
    supports_batch_invariance = _supported  # with VLLM_BATCH_INVARIANT=1 all steps run plans whose keys are not split
