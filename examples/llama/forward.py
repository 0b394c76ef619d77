"""Forward passes: chunks of prompts (`Prefill`), and the newest token of each request (`Decode`).

Both plan once for all layers, and both attend through the pages of the cache: attention of the layers is a
`PagedAttention` on the planned wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cute_attn import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from .batch import Batch, Chunk
from .cache import PagedCache, PageIndex
from .model import Llama


class PagedAttention:
    """Attention of a planned batch: write the new keys and values to their pages, then attend to all of a request."""

    def __init__(
        self,
        cache: PagedCache,
        wrapper: BatchPrefillWithPagedKVCacheWrapper | BatchDecodeWithPagedKVCacheWrapper,
        index: PageIndex,
    ) -> None:
        self.cache, self.wrapper, self.index = cache, wrapper, index

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.append(layer, k, v, self.index)
        k_scale, v_scale = self.cache.scales[layer]
        return self.wrapper.run(q, self.cache.layers[layer], k_scale=k_scale, v_scale=v_scale)


class Prefill:
    """Forward passes of prompt chunks: any number of requests, of tokens, and of tokens cached before."""

    def __init__(self, model: Llama, cache: PagedCache, workspace: Tensor) -> None:
        self.model, self.cache = model, cache
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD")

    def __call__(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the token that follows each chunk."""
        batch, device = Batch.of(chunks, self.cache), self.cache.device
        index = PageIndex(*(array.to(device, non_blocking=True) for array in batch.index))
        attention = self.planned(batch, index)
        hidden = self.model(batch.tokens.to(device, non_blocking=True), index.positions, attention)
        last = (batch.qo_indptr[1:] - 1).to(device, non_blocking=True)
        return self.model.logits(hidden[last]).argmax(-1).tolist()

    def planned(self, batch: Batch, index: PageIndex) -> Callable[..., Tensor]:
        """Plan a batch, and return its attention."""
        config = self.model.config
        self.wrapper.plan(  # lengths are read on the CPU, page numbers by the kernels
            batch.qo_indptr,
            batch.index.kv_indptr,
            index.kv_indices,
            batch.index.last_page_len,
            config.heads,
            config.kv_heads,
            config.head_dim,
            self.cache.page_size,
            causal=True,
            q_data_type=self.model.dtype,
            kv_data_type=self.cache.dtype,
        )
        return PagedAttention(self.cache, self.wrapper, index)


class Decode:
    """Forward passes of one token per request, for a fixed batch size; requests that are missing are padding.

    All passes share the arrays that the constructor allocates, so that one captured CUDA graph serves them all: outside
    of it, `plan` writes lengths and schedule of the step where the captured kernels read them. A graph keeps neither
    the plan nor the workspace alive; this object does.
    """

    def __init__(self, model: Llama, cache: PagedCache, workspace: Tensor, batch_size: int, graph: bool) -> None:
        self.model, self.cache, self.batch_size = model, cache, batch_size

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=cache.device)

        self.tokens = zeros(batch_size, torch.int64)
        self.index = PageIndex(
            batch_indices=zeros(batch_size),
            positions=zeros(batch_size),
            kv_indices=zeros(cache.num_pages),
            kv_indptr=zeros(batch_size + 1),
            last_page_len=zeros(batch_size),
        )
        self.attention = self.attention_of(workspace)
        self.graph = torch.cuda.CUDAGraph() if graph else None
        if self.graph is not None:
            self._load([])  # all padding: the two passes write nothing to the cache
            self._forward()  # torch and cuBLAS allocate on their first use, which a capture forbids
            with torch.cuda.graph(self.graph):
                self.next_tokens = self._forward()

    def attention_of(self, workspace: Tensor) -> Callable[..., Tensor]:
        """Return the attention of all passes, and keep the wrapper that plans them."""
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout="NHD",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self.index.kv_indptr,
            paged_kv_indices_buffer=self.index.kv_indices,
            paged_kv_last_page_len_buffer=self.index.last_page_len,
        )
        return PagedAttention(self.cache, self.wrapper, self.index)

    def plan(self, batch: Batch) -> None:
        """Plan a batch: this writes its pages to `index`."""
        config = self.model.config
        self.wrapper.plan(
            batch.index.kv_indptr,
            batch.index.kv_indices,
            batch.index.last_page_len,
            config.heads,
            config.kv_heads,
            config.head_dim,
            self.cache.page_size,
            q_data_type=self.model.dtype,
            kv_data_type=self.cache.dtype,
        )

    def __call__(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the next token of each request."""
        self._load(chunks)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.next_tokens = self._forward()
        # The one wait of a step: the engine must know who is finished. A larger engine reads the tokens of a step while
        # the next one runs.
        return self.next_tokens[: len(chunks)].tolist()

    def _load(self, chunks: Sequence[Chunk]) -> None:
        """Write a step to the arrays on the GPU: `plan` those of pages, this function the others."""
        batch = Batch.of(chunks, self.cache, padding=self.batch_size - len(chunks))
        self.plan(batch)
        self.tokens.copy_(batch.tokens, non_blocking=True)
        self.index.positions.copy_(batch.index.positions, non_blocking=True)
        self.index.batch_indices.copy_(batch.index.batch_indices, non_blocking=True)

    def _forward(self) -> Tensor:
        hidden = self.model(self.tokens, self.index.positions, self.attention)
        return self.model.logits(hidden).argmax(-1)
