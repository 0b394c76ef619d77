"""The attention of one layer: over vLLM's paged cache, or, in an encoder, over its own keys and values.

Needs torch only: `backend.py` makes of it the class that vLLM asks for.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.dispatch import append
from cute_attn.errors import ArgumentError
from cute_attn.integrations.vllm import cache, support
from cute_attn.integrations.vllm.cache import CacheViews
from cute_attn.integrations.vllm.metadata import KV_LAYOUT, LayerType, StepMetadata
from cute_attn.integrations.vllm.support import COPY, NVFP4, Layer
from cute_attn.page import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
from cute_attn.request import nvfp4
from cute_attn.request.append import Append, SlotMapping
from cute_attn.request.settings import HALF
from cute_attn.xqa import xqa_batch_decode_with_kv_cache


def has_standard_slopes(slopes: list[float] | None, num_heads: int) -> bool:
    """Tell whether a layer has ALiBi. NotImplementedError for slopes that are not those of `num_heads` heads."""
    if slopes is None:
        return False
    n = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * i / n for i in range(1, n + 1)] + [4 * (2 * j - 1) / n for j in range(1, num_heads - n + 1)]
    if len(slopes) != num_heads or any(abs(x * 2**e - 1) > 1e-5 for x, e in zip(slopes, exponents, strict=True)):
        raise NotImplementedError(
            f"alibi_slopes must be the standard ones of {num_heads} heads, which kernels compute: not scaled, and not "
            "those of a tensor-parallel rank"
        )
    return True


class LayerAttention:
    """Computes a layer's attention and writes its cache, by the names and with the arguments of vLLM.

    Parameters
    ----------
    traits : of the layer. NotImplementedError for what no kernel of the GPU supports.
    dtype : of the model: float16 or bfloat16.
    capability : compute capability of the GPU; None: CPU tensors.
    batch_invariant : a token's bits must not depend on other requests, nor on how its own was cut into chunks. Decodes
        then run the kernel of prefills. Default False.
    sinks : floating-point `[num_heads]`, natural-log domain. Default: none.
    """

    def __init__(
        self,
        traits: Layer,
        dtype: torch.dtype,
        capability: tuple[int, int] | None,
        batch_invariant: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.traits, self.dtype, self.batch_invariant, self.sinks = traits, dtype, batch_invariant, sinks
        if traits.encoder:
            check_encoder(traits)
        elif capability is not None and (reason := support.reason(traits, dtype, capability)):
            raise NotImplementedError(reason)
        self.stored = support.stored_as(traits.kv_cache_dtype)
        without = not traits.encoder and support.decodes_without_plan(traits, dtype, capability)
        self.plans_decode = batch_invariant or not without
        self._sinks: torch.Tensor | None = None  # as kernels read them
        self._seen: torch.Tensor | None = None  # the cache that `_views` are of
        self._views: CacheViews
        self._type: LayerType  # for it

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks as float32, which kernels read: once, not in every step. Again after new weights."""
        if self.sinks is None:
            return
        if self._sinks is None:
            self._sinks = self.sinks.to(torch.float32)
        else:
            self._sinks.copy_(self.sinks)  # captured graphs keep its address

    def views(self, kv_cache: torch.Tensor) -> CacheViews:
        """Return views of the layer's cache, made when it is first seen: vLLM binds one tensor to a layer."""
        if kv_cache is not self._seen:
            found = cache.views(kv_cache, self.traits)
            form = found.block_size, self.dtype, found.pair[0].dtype, self.batch_invariant
            self._type, self._views, self._seen = LayerType.of(self.traits, *form), found, kv_cache
        return self._views

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values to their slots: one launch on a GPU, which a CUDA graph can contain, indexing on a CPU.

        Parameters
        ----------
        layer : its `_k_scale` and `_v_scale` are fp32 tensors of one element: a quantised cache contains rows divided
            by them.
        key, value : `[tokens, kv_heads, head_size]`; rows past the slots are padding and not written.
        kv_cache : the layer's cache. Nothing is written to one without elements, nor by encoders, which have none.
        slot_mapping : integers `[n]`, slot = block * block_size + offset; rows of negative slots are not written.
        """
        if self.traits.encoder or not kv_cache.numel():
            return
        caches, stored, n = self.views(kv_cache), self.stored, slot_mapping.shape[0]
        if key.shape[0] != n:
            key, value = key[:n], value[:n]
        scales = layer._k_scale, layer._v_scale
        if stored == NVFP4:
            assert caches.block_scales is not None
            nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
                key, value, slot_mapping, caches.pair, caches.block_scales, *scales, kv_layout=KV_LAYOUT
            )
            return
        slots = SlotMapping(slot_mapping)
        if stored == COPY:
            append.run(Append((key, value), caches.rows, slots))
            return
        device = caches.rows[0].device
        k_scale, v_scale = (nvfp4.scale_of(name, x, device) for name, x in zip("kv", scales, strict=True))
        append.run(Append((key, value), caches.rows, slots, stored, (), (k_scale, v_scale)))

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
        """Compute the attention of a step into `output` and return it.

        Parameters
        ----------
        layer : quantised keys and values are multiplied by its `_k_scale_float` and `_v_scale_float`; its
            `mm_prefix_clamp_sliding_window` tells whether windows hide tokens of an image from its later tokens, too.
        query, output : `[tokens, heads, head_size]`; rows past the step's tokens are padding.
        key, value : read by encoders alone, whose tokens see all of their request: `[tokens, kv_heads, head_size]`.
        kv_cache : the layer's cache, into which `do_kv_cache_update`, or the layer that this one shares a cache with,
            has written the step's keys.
        attn_metadata : the step's requests. None in a profiling run, whose output is 0.
        output_scale, output_block_scale : refused.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantised output is not supported: output_scale and output_block_scale")
        if attn_metadata is None:
            return output.fill_(0)
        step, scale = attn_metadata, self.traits.scale
        if self.traits.encoder:
            assert key is not None
            assert value is not None
            kind = LayerType.of(self.traits, 0, query.dtype, query.dtype, self.batch_invariant)
            wrapper, rows, _ = step.planned(kind, decodes_too=True)
            wrapper.run(query[rows], key[rows], value[rows], q_scale=scale, out=output[rows])
            return output
        if query.dtype not in HALF or output.dtype != query.dtype:
            raise ArgumentError(
                f"query and output must both be float16 or bfloat16, got {query.dtype} and {output.dtype}"
            )
        caches = self.views(kv_cache)
        scales = (1.0, 1.0) if self.stored == COPY else (layer._k_scale_float, layer._v_scale_float)
        if step.decodes.num_reqs and not self.plans_decode:
            self._decode(query, caches, step, output, scales)
        if not (step.has_prefills or self.plans_decode):
            return output
        wrapper, rows, ranges = step.planned(self._type, self.plans_decode)
        window_left, options = self.traits.window_left, {}
        if ranges is not None:
            clamps = getattr(layer, "mm_prefix_clamp_sliding_window", False)
            options = {"bidirectional_ranges": ranges, "causal_window_left": window_left}
            options["range_window_left"] = window_left + 1 if clamps else -1
        wrapper.run(
            query[rows],
            caches.pair,
            q_scale=scale,
            k_scale=scales[0],
            v_scale=scales[1],
            out=output[rows],
            sinks=self._sinks,
            kv_cache_sf=caches.block_scales,
            **options,
        )
        return output

    def _decode(
        self,
        query: torch.Tensor,
        caches: CacheViews,
        step: StepMetadata,
        output: torch.Tensor,
        scales: tuple[float, float],
    ) -> None:
        decodes, tables = step.decodes, step.decode_tables
        rows = decodes.num_tokens
        xqa_batch_decode_with_kv_cache(
            query if query.shape[0] == rows else query[:rows],
            caches.pair,
            step.sessions.workspaces.decode,
            tables,
            step.decode_seq_lens,
            tables.shape[1] * caches.block_size,
            bmm1_scale=self.traits.scale * scales[0],
            bmm2_scale=scales[1],
            window_left=self.traits.window_left,
            out=output if output.shape[0] == rows else output[:rows],
            sinks=self._sinks,
            kv_layout=KV_LAYOUT,
            q_len_per_req=decodes.q_len,
            kv_cache_sf=caches.block_scales,
            q_cu_seq_lens=step.decode_starts,
        )


def check_encoder(traits: Layer) -> None:
    """Refuse a window, which an encoder has on both sides, and what vLLM's encoders do not have."""
    odd = {
        "sliding_window": traits.window_left >= 0,
        "alibi_slopes": traits.alibi,
        "sinks": traits.sinks,
        "kv_cache_dtype": traits.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
    }
    for name, given in odd.items():
        if given:
            raise NotImplementedError(
                f"encoder attention must have no {name}: kernels would need a window to the right, a bias of both "
                "sides, or keys of a cache"
            )
