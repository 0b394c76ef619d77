"""The attention of an encoder's layer: over its own keys and values, in both directions, without a cache."""

from __future__ import annotations

import torch

from cute_attn.integrations.vllm.metadata import LayerType, StepMetadata
from cute_attn.integrations.vllm.support import Layer


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
        kind = LayerType(
            self.layer.num_heads,
            self.layer.num_kv_heads,
            self.layer.head_size,
            page_size=0,
            q_dtype=query.dtype,
            kv_dtype=query.dtype,
            window_left=-1,
            soft_cap=self.layer.soft_cap,
            pos_encoding_mode="NONE",
            decodes_too=True,
            batch_invariant=self.batch_invariant,
            causal=False,
        )
        session = step.planned(kind)
        rows = session.rows
        session.wrapper.run(query[rows], key[rows], value[rows], q_scale=self.layer.scale, out=output[rows])
