"""Continuous batching: requests join and leave between steps, and the cache's pages go with them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .batch import Chunk, Request
from .cache import PagedCache
from .forward import Decode, Prefill
from .model import Llama

WORKSPACE_BYTES = 128 << 20  # enough for every batch


@dataclass
class Speed:
    """Tokens that went through the model, and the seconds that they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Engine:
    """Serves requests in steps. A step prefills at most `chunk_tokens` tokens and decodes at most `max_batch` requests.

    Long prompts are cut into chunks, so that a step stays short for the requests that decode beside them.
    """

    prefill_pass: ClassVar[type[Prefill]] = Prefill
    decode_pass: ClassVar[type[Decode]] = Decode

    def __init__(self, model: Llama, cache: PagedCache, max_batch: int, chunk_tokens: int, graphs: bool) -> None:
        self.cache, self.max_batch, self.chunk_tokens = cache, max_batch, chunk_tokens
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)  # passes take turns with it
        self.prefill = self.prefill_pass(model, cache, workspace)
        sizes = padded_sizes(max_batch)  # ascending
        self.decodes = [self.decode_pass(model, cache, workspace, size, graphs) for size in sizes]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefilled, self.decoded = Speed(), Speed()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that could never run."""
        if not request.prompt or request.new_tokens < 1:
            raise ValueError("a request needs a prompt and at least one new token")
        if self._pages(request) > self.cache.num_pages:
            raise ValueError(f"a request needs {self._pages(request)} pages, the cache has {self.cache.num_pages}")
        self.waiting.append(request)

    def step(self) -> int:
        """Advance every running request that the step has room for. Return the number of new tokens."""
        self._admit()
        prefill, decode = self._schedule()
        new_tokens = 0
        if prefill:
            new_tokens += self._advance(prefill, self.prefill, self.prefilled)
        if decode:
            forward = next(forward for forward in self.decodes if forward.batch_size >= len(decode))
            new_tokens += self._advance(decode, forward, self.decoded)
        for request in [request for request in self.running if request.finished]:
            self.running.remove(request)
            self.cache.release(request.pages)
        return new_tokens

    def _admit(self) -> None:
        """Let requests in, in the order of their arrival, while there are pages for all that they will ever need.

        Production engines take pages as requests grow, and evict a request where none is left.
        """
        while self.waiting and len(self.running) < self.max_batch:
            pages = self._pages(self.waiting[0])
            if pages > self.cache.num_free:
                break
            request = self.waiting.popleft()
            request.pages = self.cache.take(pages)
            self.running.append(request)

    def _pages(self, request: Request) -> int:
        """Count the pages of a request at its end; its last token is never a key."""
        return self.cache.pages_for(len(request.prompt) + request.new_tokens - 1)

    def _schedule(self) -> tuple[list[Chunk], list[Chunk]]:
        """Choose what goes through the model: chunks of prompts, and single tokens of the requests that decode.

        The last token of a prompt may be left for a decode step, which is all that a prompt of one token needs.
        """
        decode = [Chunk(request, 1) for request in self.running if request.remaining == 1]
        prefill, room = [], self.chunk_tokens
        for request in self.running:
            if request.remaining > 1 and room:
                prefill.append(Chunk(request, min(request.remaining, room)))
                room -= prefill[-1].count
        return prefill, decode

    def _advance(self, chunks: Sequence[Chunk], forward: Callable[[Sequence[Chunk]], list[int]], speed: Speed) -> int:
        """Run a forward pass. Return the number of new tokens: a chunk that ends within a prompt gives none."""
        start, new_tokens = time.perf_counter(), 0
        for chunk, token in zip(chunks, forward(chunks), strict=True):
            chunk.request.cached += chunk.count
            if chunk.request.remaining == 0:
                chunk.request.tokens.append(token)
                new_tokens += 1
        speed.seconds += time.perf_counter() - start
        speed.tokens += sum(chunk.count for chunk in chunks)
        return new_tokens


def padded_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes of decode, a graph each: powers of two, and the largest batch."""
    return [1 << i for i in range((max_batch - 1).bit_length())] + [max_batch]


def serve(
    engine: Engine, requests: Sequence[Request], progress: Callable[[int], None] = lambda new_tokens: None
) -> int:
    """Run requests to their end, each from its arrival on. Return the number of steps.

    `progress` is called after every step with its number of new tokens.
    """
    coming, steps = deque(sorted(requests, key=lambda request: request.arrival)), 0
    while coming or engine.busy:
        while coming and coming[0].arrival <= steps:
            engine.add(coming.popleft())
        new_tokens = engine.step()
        steps += 1
        if progress is not None:
            progress(new_tokens)
    return steps
