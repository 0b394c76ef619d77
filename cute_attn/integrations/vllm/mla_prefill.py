"""The prefill of models with latent attention, as vLLM asks for it: `attention_config={"mla_prefill_backend":
"CUTE_ATTN_MLA"}`, beside any backend of decodes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from cute_attn.integrations.vllm import MLA_NAME, support
from cute_attn.integrations.vllm.latent import LatentPrefills
from cute_attn.integrations.vllm.metadata import workspaces
from cute_attn.request.settings import HALF


class CuteAttnMLAPrefillBackend(MLAPrefillBackend):
    """Prefill of decompressed keys and values on cute_attn's kernels."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(HALF)
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    ]
    _prefills: LatentPrefills | None = None  # of a builder's backend: each layer has one that never runs

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM's registry of prefill backends has it."""
        return MLA_NAME

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
            self._prefills = LatentPrefills(
                workspaces(self.vllm_config, prefill_metadata.query_start_loc.device).planned,
                num_qo_heads=self.num_heads,
                num_kv_heads=self.num_heads,
                head_dim_qk=self.qk_nope_head_dim + self.qk_rope_head_dim,
                head_dim_vo=self.v_head_dim,
                sm_scale=self.scale,
            )
        self._prefills.begin(prefill_metadata.query_lens_cpu)

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
        return self._prefills.run((q, k, v), out, return_softmax_lse)

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> Any:
        """Compute the attention of new tokens over a chunk of their context, all of which they see."""
        assert self._prefills is not None
        return self._prefills.run((q, k, v), out, True, chunk)
