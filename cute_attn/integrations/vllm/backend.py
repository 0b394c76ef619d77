"""The backend as vLLM's registry names it: the attention of a layer, the metadata of a step, and what is supported."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from cute_attn.integrations.vllm import NAME, support
from cute_attn.integrations.vllm.attention import LayerAttention, has_standard_slopes
from cute_attn.integrations.vllm.metadata import Batch, Sessions, StepMetadata, split_decodes, workspaces
from cute_attn.integrations.vllm.support import Layer
from cute_attn.request.settings import HALF

ENCODERS = AttentionType.ENCODER, AttentionType.ENCODER_ONLY


class CuteAttnImpl(LayerAttention, AttentionImpl):
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
        traits = Layer(
            num_heads,
            head_size,
            self.scale,
            self.num_kv_heads,
            kv_cache_dtype,
            window_left=-1 if sliding_window is None else sliding_window - 1,
            soft_cap=logits_soft_cap or 0.0,
            alibi=has_standard_slopes(alibi_slopes, num_heads),
            sinks=sinks is not None,
            encoder=attn_type in ENCODERS,
        )
        capability = current_platform.get_device_capability()
        LayerAttention.__init__(
            self,
            traits,
            get_current_vllm_config().model_config.dtype,
            None if capability is None else (capability.major, capability.minor),
            envs.VLLM_BATCH_INVARIANT,
            sinks,
        )


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
        found = [impl for layer in layers if isinstance(impl := getattr(layer, "impl", None), CuteAttnImpl)]
        follows = getattr(vllm_config, "use_v2_model_runner", False)
        if any(impl.traits.encoder or (impl.plans_decode and not follows) for impl in found):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_BATCH

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
            common.query_start_loc,
            common.query_start_loc_cpu,
            common.seq_lens,
            common.block_table_tensor,
            common.seq_lens_cpu_upper_bound,
            exact,
            gpu_sync_allowed,
        )
        return StepMetadata(batch, decodes, self._sessions, common.causal, mm_prefix_range=common.mm_req_doc_ranges)


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

    get_name = staticmethod(lambda: NAME)
    get_impl_cls = staticmethod(lambda: CuteAttnImpl)
    get_builder_cls = staticmethod(lambda: CuteAttnMetadataBuilder)

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
