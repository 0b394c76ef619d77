"""Requests, and the index arrays that describe some of their tokens to the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import PagedCache, PageIndex


@dataclass(eq=False)
class Request:
    """A prompt to be continued by `new_tokens` tokens, which comes in before step `arrival`.

    Of its tokens, those of the prompt and those generated since, the first `cached` have keys and values in the cache.
    The next token is known once the model has seen the others.
    """

    prompt: list[int]
    new_tokens: int
    arrival: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.cached = 0
        self.pages = ints([])  # of the cache, from its admission by the engine on

    @property
    def remaining(self) -> int:
        """Tokens that the model has not seen: more than 1 before and during prefill, 1 during decode."""
        return len(self.tokens) - self.cached

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        return len(self.output) == self.new_tokens


@dataclass(frozen=True)
class Chunk:
    """The next `count` tokens of a request."""

    request: Request
    count: int


@dataclass(frozen=True)
class Batch:
    """The arrays of one forward pass. They are on the CPU, where planning reads them without waiting for the GPU."""

    tokens: Tensor  # int64 [num_tokens]
    qo_indptr: Tensor  # int32 [batch_size + 1], where each request's tokens start
    index: PageIndex

    @classmethod
    def of(cls, chunks: Sequence[Chunk], cache: PagedCache, padding: int = 0) -> Batch:
        """Describe the chunks, and `padding` more requests of one token each that have no pages."""
        tokens: list[int] = []
        owners: list[int] = []
        positions: list[int] = []
        pages = [ints([])]
        qo_indptr, kv_indptr = [0], [0]
        last_page_len: list[int] = []
        for i, chunk in enumerate(chunks):
            request, count = chunk.request, chunk.count
            kv_len = request.cached + count  # the new tokens are keys too: each attends to itself and those before
            used = cache.pages_for(kv_len)
            tokens += request.tokens[request.cached : kv_len]
            owners += [i] * count
            positions += range(request.cached, kv_len)
            pages.append(request.pages[:used])
            qo_indptr.append(len(tokens))
            kv_indptr.append(kv_indptr[-1] + used)
            last_page_len.append(kv_len - (used - 1) * cache.page_size)
        for _ in range(padding):
            tokens.append(0)
            owners.append(-1)
            positions.append(0)
            qo_indptr.append(len(tokens))
            kv_indptr.append(kv_indptr[-1])
            last_page_len.append(1)
        index = PageIndex(ints(owners), ints(positions), torch.cat(pages), ints(kv_indptr), ints(last_page_len))
        return cls(torch.tensor(tokens, dtype=torch.int64), ints(qo_indptr), index)


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
