"""Forward passes of a model with latent attention: chunks of prompts, and decode steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_attn import BatchMLAPagedAttentionWrapper, BatchPrefillWithRaggedKVCacheWrapper
from examples.llama.batch import Batch, ints
from examples.llama.cache import PageIndex
from examples.llama.engine import Engine
from examples.llama.forward import Decode, Prefill

from .cache import LatentCache
from .model import LATENT, NOPE, ROPE, VALUE, DeepSeek, LatentLayer

SCALE = (NOPE + ROPE) ** -0.5


class LatentPrefill(Prefill):
    """Forward passes of prompt chunks. The rows of a request, old and new, are decompressed to keys and values of every
    head: with many query tokens that is less work than attention over latent rows, which are longer.
    """

    def __init__(self, model: DeepSeek, cache: LatentCache, workspace: Tensor) -> None:
        self.model, self.cache = model, cache
        self.ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace)

    def planned(self, batch: Batch, index: PageIndex) -> Callable[..., Tensor]:
        """Plan a batch, and return its attention."""
        config, cache = self.model.config, self.cache
        assert isinstance(cache, LatentCache)
        lengths = kv_lens(batch.index, cache.page_size)
        bounds = torch.cat((ints([0]), lengths.cumsum(0).int()))
        self.ragged.plan(
            batch.qo_indptr,
            bounds,
            config.heads,
            config.heads,
            NOPE + ROPE,
            VALUE,
            causal=True,
            sm_scale=SCALE,
            q_data_type=self.model.dtype,
        )
        slots = rows_of(batch.index, lengths, cache.page_size).to(cache.device, non_blocking=True)

        def attention(layer: LatentLayer, q: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
            cache.append_latent(layer.index, latent, k_pe, index)
            rows = cache.layers[layer.index].flatten(0, 1)[slots]
            return self.ragged.run(q, *layer.decompressed(*rows.split([LATENT, ROPE], dim=-1)))

        return attention


class LatentDecode(Decode):
    """Forward passes of one token per request: queries are absorbed, and attention reads latent rows as they are."""

    def attention_of(self, workspace: Tensor) -> Callable[..., Tensor]:
        """Return the attention of all passes, and keep the wrapper that plans them."""
        cache = self.cache
        assert isinstance(cache, LatentCache)
        self.latent = latent = BatchMLAPagedAttentionWrapper(
            workspace,
            use_cuda_graph=True,
            qo_indptr=torch.zeros_like(self.index.kv_indptr),
            kv_indptr=self.index.kv_indptr,
            kv_indices=self.index.kv_indices,
            kv_len_arr=torch.zeros_like(self.index.last_page_len),
        )

        def attention(layer: LatentLayer, q: Tensor, latent_rows: Tensor, k_pe: Tensor) -> Tensor:
            cache.append_latent(layer.index, latent_rows, k_pe, self.index)
            return layer.values(latent.run(*layer.absorbed(q), *cache.parts(layer.index)))

        return attention

    def plan(self, batch: Batch) -> None:
        """Plan a batch: this writes its pages to `index`."""
        self.latent.plan(
            batch.qo_indptr,
            batch.index.kv_indptr,
            batch.index.kv_indices,
            kv_lens(batch.index, self.cache.page_size),
            self.model.config.heads,
            LATENT,
            ROPE,
            self.cache.page_size,
            True,
            SCALE,
            self.model.dtype,
            self.cache.dtype,
        )
        self.index.last_page_len.copy_(batch.index.last_page_len, non_blocking=True)


class LatentEngine(Engine):
    """The engine with these passes."""

    prefill_pass = LatentPrefill
    decode_pass = LatentDecode


def kv_lens(index: PageIndex, page_size: int) -> Tensor:
    """Return the keys of each request, int32 `[batch_size]`: 0 for padding, which has no pages."""
    return (index.kv_indptr.diff() * page_size - page_size + index.last_page_len).clamp_min(0)


def rows_of(index: PageIndex, lengths: Tensor, page_size: int) -> Tensor:
    """Return where in the cache the tokens of all requests are, one request after the other."""
    slots = index.kv_indices[:, None].long() * page_size + torch.arange(page_size)
    used = zip(index.kv_indptr.tolist(), index.kv_indptr[1:].tolist(), lengths.tolist(), strict=False)
    return torch.cat([slots[begin:end].flatten()[:length] for begin, end, length in used])
