"""The backend of models with latent attention (MLA), as vLLM asks for it: decodes on the latent kernel. vLLM's own code
writes the cache, absorbs projections, and computes prefills with the backend that `mla_prefill_backend` selects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from cute_attn.integrations.vllm import MLA_NAME, latent
from cute_attn.integrations.vllm.backend import OnKernels
from cute_attn.integrations.vllm.latent import LatentDecodes
from cute_attn.integrations.vllm.metadata import split_decodes, workspaces
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
        step = LatentDecodes(decodes, block_table_tensor, seq_lens_device, query_start_loc_device, self._workspace)
        return CuteAttnMLADecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, step)


class CuteAttnMLAImpl(MLACommonImpl[MLACommonMetadata[CuteAttnMLADecodeMetadata]]):
    """The latent attention of a layer. Parameters are vLLM's; NotImplementedError for what no kernel supports."""

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        odd = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        for name, value in odd.items():
            if value is not None:
                raise NotImplementedError(f"latent attention has no {name}, got {value!r}: use another backend")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"latent attention must have attn_type 'decoder', got {attn_type!r}")
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
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(latent.CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM's registry has the backend."""
        return MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[CuteAttnMLAImpl]:
        """Return the class of a layer's attention."""
        return CuteAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CuteAttnMLAMetadataBuilder]:
        """Return the class that builds the metadata of a step."""
        return CuteAttnMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the columns of a row of the cache."""
        return [sum(latent.DIMS)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the block size where the user has not said one."""
        return max(default_block_size, BLOCK_SIZE)
