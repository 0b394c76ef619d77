"""Numbers in the formats of caches, pages of requests, and poison wherever no token is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.support.dense_attention import E2M1, nvfp4_values

SPARE_PAGES, NO_PAGE = 3, 1 << 30
Pair = tuple[torch.Tensor, torch.Tensor]


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def ends(lengths: Sequence[int]) -> torch.Tensor:
    return ints([0, *itertools.accumulate(lengths)])


def raw(x: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits as bytes: torch cannot index or stack every dtype of them."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def stacked(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One cache with K and V on its second axis."""
    return torch.stack((raw(k), raw(v)), 1).view(k.dtype)


def blank(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Poison: NaN, and the largest code in bytes that encode numbers."""
    if dtype == torch.uint8:
        return torch.full(shape, 0xFF, dtype=dtype)
    return torch.full(shape, math.nan, dtype=torch.float32).to(dtype)


@dataclass(frozen=True)
class Stored:
    """Numbers as a cache holds them: bytes or floats, block scales, and the fp64 values that they mean."""

    data: torch.Tensor
    scales: torch.Tensor | None
    values: torch.Tensor

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.data] if self.scales is None else [self.data, self.scales]


def store(x: torch.Tensor, dtype: torch.dtype) -> Stored:
    """`x` `[tokens, heads, head_dim]` rounded to a format; uint8: NVFP4."""
    if dtype != torch.uint8:
        data = x.to(dtype)
        return Stored(data, None, data.double())
    blocks = x.unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6).clamp(min=2**-9).to(torch.float8_e4m3fn)
    distance = (blocks / scales.float()[..., None])[..., None].sub(E2M1.float()).abs()
    codes = distance.argmin(-1).to(torch.uint8).flatten(-2)
    data = codes[..., ::2] | codes[..., 1::2] << 4
    return Stored(data, scales, nvfp4_values(data, scales))


def scattered(
    tokens: torch.Tensor, slots: torch.Tensor, shape: tuple[int, int], kv_layout: str = "NHD", gap: int = 0
) -> torch.Tensor:
    """A cache `[pages, page_size, heads, width]` (its two middle axes swapped for HND) with `tokens[i]` in `slots[i]`.

    `shape`: pages and their size. `gap`: bytes after heads, tokens and pages.
    """
    (pages, page_size), (heads, width) = shape, tokens.shape[1:]
    gap //= tokens.element_size()
    rows, columns = (page_size, heads) if kv_layout == "NHD" else (heads, page_size)
    whole = blank((pages, rows + bool(gap), columns + bool(gap), width + gap), tokens.dtype)
    cache = whole[:, :rows, :columns, :width]
    by_token = cache if kv_layout == "NHD" else cache.transpose(1, 2)
    raw(by_token)[slots // page_size, slots % page_size] = raw(tokens)
    return cache


class Pages:
    """Requests with pages of their own, in random order. Index arrays are int32 on the CPU."""

    def __init__(self, kv_lens: Sequence[int], page_size: int, generator: torch.Generator, num_pages: int = 0) -> None:
        """`num_pages` of the cache: 0 for as many as are needed and a few more."""
        counts = [-(-n // page_size) for n in kv_lens]
        self.page_size, self.num_pages = page_size, num_pages or sum(counts) + SPARE_PAGES
        order = torch.randperm(self.num_pages, generator=generator)[: sum(counts)]
        self.of_requests = order.split(counts) if counts else ()
        within = torch.arange(page_size)
        self.slots = [
            (own[:, None] * page_size + within).flatten()[:n] for own, n in zip(self.of_requests, kv_lens, strict=True)
        ]
        self.indptr, self.indices, self.seq_lens = ends(counts), order.int(), ints(kv_lens)
        self.last_page_len = ints([(n - 1) % page_size + 1 if n else 0 for n in kv_lens])

    def tables(self, width: int = 0, beyond: int = NO_PAGE) -> torch.Tensor:
        """Page numbers of every request, and `beyond` after its last page; by default one column more than needed."""
        width = width or 1 + max(map(len, self.of_requests), default=0)
        table = torch.full((len(self.of_requests), width), beyond, dtype=torch.int32)
        for row, own in zip(table, self.of_requests, strict=True):
            row[: len(own)] = own
        return table

    def all_slots(self) -> torch.Tensor:
        """Slots of the tokens of all requests, one request after the other."""
        return torch.cat([torch.empty(0, dtype=torch.long), *self.slots])

    def scatter(self, tokens: torch.Tensor, kv_layout: str = "NHD", gap: int = 0) -> torch.Tensor:
        """A cache with the tokens of all requests; see `scattered`."""
        return scattered(tokens, self.all_slots(), (self.num_pages, self.page_size), kv_layout, gap)

    def gather(self, cache: torch.Tensor, kv_layout: str = "NHD") -> list[torch.Tensor]:
        """What a cache holds of every request, `[kv_len, ...]`."""
        rows = (cache if kv_layout == "NHD" else cache.transpose(1, 2)).flatten(0, 1)
        return [rows[own.to(rows.device)] for own in self.slots]
