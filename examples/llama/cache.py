"""Pages: which are free, and the keys and values that they hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn import append_paged_kv_cache

E4M3 = torch.float8_e4m3fn


class PageIndex(NamedTuple):
    """Where the new tokens of a batch go, on the cache's device: the arguments of `append_paged_kv_cache`.

    All are int32. Token t is number `positions[t]` of request `b = batch_indices[t]`, whose pages are
    `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`. A batch index of -1 marks padding: such a token is not written.
    """

    batch_indices: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    kv_indices: Tensor  # [num_pages of all requests]
    kv_indptr: Tensor  # [batch_size + 1]
    last_page_len: Tensor  # [batch_size]


class PagedCache:
    """Keys and values of all layers in pages of `page_size` tokens, and a list of the pages that are free.

    A page number stands for the same page of every layer, so a request has one list of pages. `dtype` is that of the
    model or E4M3; the latter needs `scales`, a pair (k_scale, v_scale) per layer: value = fp8 * scale.
    """

    def __init__(
        self,
        config: Any,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: list[tuple[float, float]] | None = None,
    ) -> None:
        self.config, self.page_size, self.num_pages, self.dtype = config, page_size, num_pages, dtype
        self.device = torch.device(device)
        shape = num_pages, *self.page_shape()
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.scales = scales or [(1.0, 1.0)] * config.layers
        self._free = list(range(num_pages))

    def page_shape(self) -> tuple[int, ...]:
        """Return the shape of a page: keys and values, with "NHD" behind them."""
        return 2, self.page_size, self.config.kv_heads, self.config.head_dim

    # ---- pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Tell how many pages `num_tokens` tokens of one request need."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> Tensor:
        """Take pages off the free list: their numbers, int32 `[count]` on the CPU, where plans are made."""
        assert count <= self.num_free
        taken, self._free = self._free[:count], self._free[count:]
        return torch.tensor(taken, dtype=torch.int32)

    def release(self, pages: Tensor) -> None:
        """Return pages. Their old contents may stay: attention reads no further than the length of a request."""
        self._free += pages.tolist()

    # ---- contents

    def append(self, layer: int, k: Tensor, v: Tensor, index: PageIndex) -> None:
        """Write the new tokens' keys and values, `[num_tokens, kv_heads, head_dim]`, to their pages."""
        k_scale, v_scale = self.scales[layer]
        k, v = quantized(k, k_scale, self.dtype), quantized(v, v_scale, self.dtype)
        append_paged_kv_cache(k, v, *index[:2], self.layers[layer], *index[2:])


def quantized(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Convert to the cache's dtype. A number too large for fp8 becomes the largest: torch alone would make it NaN."""
    if dtype != E4M3:
        return x
    limit = torch.finfo(E4M3).max
    return (x.float() / scale).clamp(-limit, limit).to(E4M3)
