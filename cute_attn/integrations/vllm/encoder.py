"""The attention of an encoder's layer: over its own keys and values, in both directions, without a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_attn.integrations.vllm.attention import Layer
from cute_attn.integrations.vllm.metadata import StepMetadata
from cute_attn.prefill import BatchPrefillWithRaggedKVCacheWrapper


class EncoderType(NamedTuple):
    """What a plan depends on besides lengths."""

    num_qo_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    soft_cap: float
    batch_invariant: bool

    def wrapper(self, workspace: torch.Tensor, backend: str) -> BatchPrefillWithRaggedKVCacheWrapper:
        """Return a wrapper for layers of the type."""
        return BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)

    def options(self) -> dict[str, Any]:
        """Return the keywords of its `plan`."""
        return {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim_qk": self.head_size,
            "sm_scale": 1.0,
            "logits_soft_cap": self.soft_cap,
            "q_data_type": self.dtype,
            "disable_split_kv": self.batch_invariant,
        }


class EncoderAttention:
    """Computes the attention of an encoder's layer.

    Parameters
    ----------
    layer : numbers of the layer. NotImplementedError for a window, which an encoder has on both sides, and for ALiBi,
        sinks and quantised caches, which vLLM's encoders do not have.
    batch_invariant : a token's bits must not depend on other requests. Default False.
    """

    plans_decode = False

    def __init__(self, layer: Layer, batch_invariant: bool = False) -> None:
        odd = {
            "sliding_window": layer.window_left >= 0,
            "alibi_slopes": layer.alibi,
            "sinks": layer.sinks,
            "kv_cache_dtype": layer.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
        }
        for name, given in odd.items():
            if given:
                raise NotImplementedError(
                    f"encoder attention must have no {name}: kernels would need a window to the right, a bias of both "
                    "sides, or keys of a cache"
                )
        self.layer = layer
        self.batch_invariant = batch_invariant
        self.sinks: torch.Tensor | None = None

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: StepMetadata,
        output: torch.Tensor,
    ) -> None:
        """Compute the attention of a step's requests, each over all of its own tokens, into `output`.

        `query` and `output` are `[tokens, heads, head_size]`, `key` and `value` `[tokens, kv_heads, head_size]`; rows
        past the step's tokens are padding.
        """
        layer = self.layer
        kind = EncoderType(
            layer.num_heads, layer.num_kv_heads, layer.head_size, query.dtype, layer.soft_cap, self.batch_invariant
        )
        session = step.planned_encoder(kind)
        rows = session.rows
        session.wrapper.run(query[rows], key[rows], value[rows], q_scale=layer.scale, out=output[rows])
