"""The attention of one layer: over vLLM's paged cache, or, in an encoder, over its own keys and values."""

from __future__ import annotations

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
    """Computes a layer's attention and writes its cache.

    Parameters
    ----------
    layer : numbers of the layer.
    dtype : of the model: float16 or bfloat16.
    capability : compute capability of the GPU; None: CPU tensors.
    batch_invariant : a token's bits must not depend on other requests, nor on how its own was cut into chunks. Decodes
        then run the kernel of prefills. Default False.
    """

    def __init__(
        self, layer: Layer, dtype: torch.dtype, capability: tuple[int, int] | None, batch_invariant: bool = False
    ) -> None:
        self.layer, self.dtype = layer, dtype
        self.stored = support.stored_as(layer.kv_cache_dtype)
        if capability is not None and (reason := support.reason(layer, dtype, capability)):
            raise NotImplementedError(reason)
        self.batch_invariant = batch_invariant
        self.plans_decode = batch_invariant or not support.decodes_without_plan(layer, dtype, capability)
        self.sinks: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None  # the cache that `_views` are of
        self._views: CacheViews
        self._type: LayerType  # for it

    def views(self, kv_cache: torch.Tensor) -> CacheViews:
        """Return views of the layer's cache, made when it is first seen: vLLM binds one tensor to a layer."""
        if kv_cache is not self._seen:
            found = cache.views(kv_cache, self.layer)
            form = found.block_size, self.dtype, found.pair[0].dtype, self.batch_invariant
            self._type, self._views, self._seen = LayerType.of(self.layer, *form), found, kv_cache
        return self._views

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Write keys and values to their slots: one launch on a GPU, which a CUDA graph can contain, indexing on a CPU.

        Parameters
        ----------
        key, value : `[tokens, kv_heads, head_size]`; rows past the slots are padding and not written.
        kv_cache : the layer's cache. Nothing is written to one without elements.
        slot_mapping : integers `[n]`, slot = block * block_size + offset; rows of negative slots are not written.
        scales : of keys and of values, fp32 tensors of one element; a quantised cache contains rows divided by them.
        """
        if not kv_cache.numel():
            return
        caches, stored, n = self.views(kv_cache), self.stored, slot_mapping.shape[0]
        if key.shape[0] != n:
            key, value = key[:n], value[:n]
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

    def run(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: StepMetadata,
        output: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        clamps_ranges: bool = False,
    ) -> None:
        """Compute the attention of a step over the cache, which has the step's keys already, into `output`.

        Parameters
        ----------
        query, output : `[tokens, heads, head_size]`; rows past the step's tokens are padding.
        kv_cache : the layer's cache.
        step : the step's requests.
        k_scale, v_scale : what quantised keys and values are multiplied by. Default 1.
        clamps_ranges : whether the layer's window hides tokens of an image from its later tokens, too. Default False.
        """
        if query.dtype not in HALF or output.dtype != query.dtype:
            raise ArgumentError(
                f"query and output must both be float16 or bfloat16, got {query.dtype} and {output.dtype}"
            )
        caches = self.views(kv_cache)
        if self.stored == COPY:
            k_scale = v_scale = 1.0
        if step.decodes.num_reqs and not self.plans_decode:
            self._decode(query, caches, step, output, (k_scale, v_scale))
        if not (step.has_prefills or self.plans_decode):
            return
        wrapper, rows, ranges = step.planned(self._type, self.plans_decode)
        window_left, options = self.layer.window_left, {}
        if ranges is not None:
            options = {"bidirectional_ranges": ranges, "causal_window_left": window_left}
            options["range_window_left"] = window_left + 1 if clamps_ranges else -1
        wrapper.run(
            query[rows],
            caches.pair,
            q_scale=self.layer.scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=output[rows],
            sinks=self.sinks,
            kv_cache_sf=caches.block_scales,
            **options,
        )

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
            bmm1_scale=self.layer.scale * scales[0],
            bmm2_scale=scales[1],
            window_left=self.layer.window_left,
            out=output if output.shape[0] == rows else output[:rows],
            sinks=self.sinks,
            kv_layout=KV_LAYOUT,
            q_len_per_req=decodes.q_len,
            kv_cache_sf=caches.block_scales,
            q_cu_seq_lens=step.decode_starts,
            backend=step.sessions.backend,
        )


class EncoderAttention:
    """Computes the attention of an encoder's layer.

    Parameters
    ----------
    layer : numbers of the layer. NotImplementedError for a window, which an encoder has on both sides, and for ALiBi,
        sinks and quantised caches, which vLLM's encoders do not have.
    batch_invariant : a token's bits must not depend on other requests. Default False.
    """

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
        self.layer, self.batch_invariant = layer, batch_invariant

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepMetadata, output: torch.Tensor
    ) -> None:
        """Compute the attention of a step's requests, each over all of its own tokens, into `output`.

        `query` and `output` are `[tokens, heads, head_size]`, `key` and `value` `[tokens, kv_heads, head_size]`; rows
        past the step's tokens are padding.
        """
        kind = LayerType.of(self.layer, 0, query.dtype, query.dtype, self.batch_invariant)
        wrapper, rows, _ = step.planned(kind, decodes_too=True)
        wrapper.run(query[rows], key[rows], value[rows], q_scale=self.layer.scale, out=output[rows])
