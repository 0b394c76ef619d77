"""The backends of models with latent attention (MLA), as vLLM asks for them. That of decodes runs the latent kernel:
vLLM's own code writes the cache, absorbs projections, and computes prefills with the backend that
`attention_config={"mla_prefill_backend": NAME}` selects. Ours is `CUTE_ATTN_MLA`, too, beside any backend of decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from cute_attn.integrations import latent
from cute_attn.integrations.latent import LatentDecodes, LatentPrefills
from cute_attn.integrations.vllm import MLA_NAME, support
from cute_attn.integrations.vllm.backend import OnKernels
from cute_attn.integrations.vllm.metadata import split_decodes, workspaces
from cute_attn.request.index_arrays import bounds, int32
from cute_attn.request.settings import HALF

BLOCK_SIZE = 64  # tokens, where the user has not said: short blocks make long tables


@dataclass
class CuteAttnMLADecodeMetadata(MLACommonDecodeMetadata):
    """What the layers of a KV cache group share in one step, for its decodes."""

    step: LatentDecodes


class CuteAttnMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata[CuteAttnMLADecodeMetadata]]):
    """Builds a step's metadata: a few slices. Requests of up to 1 + num_speculative_tokens query tokens are decodes,
    also with different numbers of them.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._workspace = workspaces(vllm_config, device).planned

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> CuteAttnMLADecodeMetadata:
        count = block_table_tensor.shape[0]
        decodes = split_decodes(query_start_loc_cpu, count, num_decode_tokens, max_query_len, max_query_len)
        starts = None if decodes.uniform else query_start_loc_device
        where = block_table_tensor, seq_lens_device, starts
        step = LatentDecodes(decodes.num_tokens, decodes.q_len, *where, self._workspace)
        return CuteAttnMLADecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, step)


class CuteAttnMLAImpl(MLACommonImpl[MLACommonMetadata[CuteAttnMLADecodeMetadata]]):
    """The latent attention of a layer. Parameters are vLLM's, all by name; NotImplementedError for what no kernel
    supports.
    """

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_pcp = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
            if (value := options[name]) is not None:
                raise NotImplementedError(f"latent attention has no {name}, got {value!r}: use another backend")
        if options["attn_type"] != AttentionType.DECODER:
            raise NotImplementedError(f"latent attention must have attn_type 'decoder', got {options['attn_type']!r}")
        if (self.kv_lora_rank, self.qk_rope_head_dim) != latent.DIMS:
            raise NotImplementedError(
                f"kv_lora_rank and qk_rope_head_dim must be {latent.DIMS}, got {self.kv_lora_rank} and "
                f"{self.qk_rope_head_dim}: use TRITON_MLA"
            )
        self.supports_quant_query_input = False  # queries stay in 16 bits over an fp8 cache

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata[CuteAttnMLADecodeMetadata],
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the attention of the step's decodes: out `[tokens, heads, 512]`, and lse where ranks are merged."""
        assert attn_metadata.decode is not None
        return latent.decode(
            q, kv_c_and_k_pe_cache, attn_metadata.decode.step, self.scale, layer._k_scale_float,
            self.need_to_return_lse_for_decode,
        )  # fmt: skip


class CuteAttnMLABackend(OnKernels, MLACommonBackend):
    """Latent attention on cute_attn's kernels. What is not supported is refused with a reason when vLLM validates its
    configuration: sparse attention, sliding windows, prefill context parallelism, batch invariance.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(HALF)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(support.LATENT_DTYPES)

    get_name = staticmethod(lambda: MLA_NAME)
    get_impl_cls = staticmethod(lambda: CuteAttnMLAImpl)
    get_builder_cls = staticmethod(lambda: CuteAttnMLAMetadataBuilder)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the columns of a row of the cache."""
        return [sum(latent.DIMS)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the block size where the user has not said one."""
        return max(default_block_size, BLOCK_SIZE)


class CuteAttnMLAPrefillBackend(MLAPrefillBackend):
    """Prefill of decompressed keys and values on cute_attn's kernels."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(HALF)
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    ]
    _prefills: LatentPrefills | None = None  # of a builder's backend: each layer has one that never runs

    get_name = staticmethod(lambda: MLA_NAME)

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        """Return whether some kernel runs on the GPU."""
        given = device_capability
        return given is not None and support.compute_capability_reason(given.major, given.minor) is None

    @classmethod
    def is_available(cls) -> bool:
        """Return False where results must be batch invariant: splits of these plans depend on the batch."""
        return not envs.VLLM_BATCH_INVARIANT

    def supports_out(self) -> bool:
        """Return True: results go where the caller says."""
        return True

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Take the prefills of the next step. Its first layer plans them."""
        super().prepare_metadata(prefill_metadata)
        if self._prefills is None:
            device = prefill_metadata.query_start_loc.device
            self._prefills = LatentPrefills(workspaces(self.vllm_config, device).planned)
        self._starts = int32(bounds(prefill_metadata.query_lens_cpu.numpy()))

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """Compute the attention of the step's new tokens over themselves, causal."""
        if output_scale is not None:
            raise NotImplementedError("quantised output is not supported: output_scale")
        assert self._prefills is not None
        return self._prefills.run(self._starts, (q, k, v), self.scale, out, return_softmax_lse)

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> Any:
        """Compute the attention of new tokens over a chunk of their context, all of which they see."""
        assert self._prefills is not None
        return self._prefills.run(self._starts, (q, k, v), self.scale, out, True, chunk)
