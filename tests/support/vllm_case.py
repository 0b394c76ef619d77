"""A step of vLLM without vLLM: its cache of one layer in either memory order, its batch, and attention by the formula.

Caches are allocated as vLLM does it: blocks in memory order, then permuted to `[blocks, heads, block_size, content]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cute_attn.integrations.vllm.attention import LayerAttention
from cute_attn.integrations.vllm.metadata import Batch, Sessions, Spans, StepMetadata, split_decodes
from cute_attn.integrations.vllm.support import Layer
from cute_attn.integrations.workspaces import Workspaces
from tests.support.dense_attention import attention, seen

UNTOUCHED = 7.0  # of output rows that no request has
CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass
class Step:
    """Requests of one step: (query tokens, keys with those of the step). `padding`: requests without tokens."""

    requests: Sequence[tuple[int, int]]
    layer: Layer
    threshold: int = 1
    memory_order: str = "NHD"
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    padding: int = 0
    padded_tokens: int = 0
    scales: tuple[float, float] = (1.0, 1.0)
    slopes: Sequence[float] | None = None
    batch_invariant: bool = False
    causal: bool = True
    images: Spans | None = None
    clamps_ranges: bool = False
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        layer, heads = self.layer, self.layer.num_kv_heads
        longest = max(kv_len for _, kv_len in self.requests)
        self.width = -(-longest // self.block_size) + 1
        count = len(self.requests) + self.padding
        blocks = count * self.width + 3
        order = (
            torch.randperm(blocks - 1, generator=self.generator)[: count * self.width] + 1
        )  # block 0: vLLM's padding
        self.tables = order.view(count, self.width).int()
        self.tables[len(self.requests) :] = 0
        self.cache = self._empty_cache(blocks)
        self.k, self.v = (
            [self._normal(kv_len, heads, layer.head_size) * (1.5 if i == 0 else 1.0) for _, kv_len in self.requests]
            for i in range(2)
        )
        self.q = [self._normal(q_len, layer.num_heads, layer.head_size) for q_len, _ in self.requests]
        self.sinks = torch.linspace(-1, 2, layer.num_heads) if layer.sinks else None

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def _empty_cache(self, blocks: int) -> torch.Tensor:
        layer, heads, content = self.layer, self.layer.num_kv_heads, 2 * self.layer.head_size
        dtype = torch.uint8 if layer.kv_cache_dtype != "auto" else self.dtype
        if layer.kv_cache_dtype == "nvfp4":
            heads, content = 2 * heads, layer.head_size // 2 + layer.head_size // 16
        inner = (self.block_size, heads) if self.memory_order == "NHD" else (heads, self.block_size)
        memory = torch.zeros(blocks, *inner, content, dtype=dtype, device=self.device)
        if dtype != torch.uint8:
            memory.fill_(math.nan)  # slots that no token has
        return memory.transpose(1, 2) if self.memory_order == "NHD" else memory

    def slots(self, padding: int = 0) -> torch.Tensor:
        """Slots of all tokens, then -1 for padding rows."""
        found, size = [], self.block_size
        for i, (_, kv_len) in enumerate(self.requests):
            positions = torch.arange(kv_len)
            found.append(self.tables[i, positions // size].long() * size + positions % size)
        return torch.cat([*found, torch.full((padding,), -1)]).to(self.device)

    def fill(self, attention: LayerAttention) -> None:
        """Write the keys and values of all requests, with some rows of padding."""
        rows = [torch.cat([*x, self._normal(2, *x[0].shape[1:])]).to(self.device) for x in (self.k, self.v)]
        scales = [torch.tensor(x, device=self.device) for x in self.scales]
        attention.write(rows[0], rows[1], self.cache, self.slots(padding=1), (scales[0], scales[1]))

    def metadata(self, backend: str = "auto") -> StepMetadata:
        """The step's metadata, as the builder makes it, with lengths on the device only."""
        lengths = [q_len for q_len, _ in self.requests]
        starts = torch.tensor(np.concatenate(([0], np.cumsum([*lengths, *[0] * self.padding]))), dtype=torch.int32)
        seq_lens = torch.tensor([*(kv_len for _, kv_len in self.requests), *[0] * self.padding], dtype=torch.int32)
        count, tokens = len(seq_lens), sum(lengths) + self.padded_tokens
        batch = Batch(
            count, tokens, starts.to(self.device), starts, seq_lens.to(self.device), self.tables.to(self.device)
        )
        decodes = split_decodes(starts, count, tokens, max(lengths), self.threshold)
        if backend == "emulator":  # it keeps a record of every byte
            workspaces = Workspaces(torch.empty(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8))
        else:
            workspaces = Workspaces.on(torch.device(self.device))
        return StepMetadata(batch, decodes, Sessions(workspaces, backend), self.causal, mm_prefix_range=self.images)

    def attention(self) -> LayerAttention:
        """The layer."""
        capability = torch.cuda.get_device_capability() if self.device == "cuda" else None
        attention = LayerAttention(self.layer, self.dtype, capability, self.batch_invariant)
        attention.sinks = None if self.sinks is None else self.sinks.to(self.device)
        return attention

    def output(self, attention: LayerAttention, step: StepMetadata) -> torch.Tensor:
        """Run the layer: output rows of the requests. Asserts that no row past the query's is written."""
        query = torch.cat([*self.q, self._normal(self.padded_tokens + 3, *self.q[0].shape[1:])]).to(self.device)
        out = torch.full_like(query, UNTOUCHED)
        attention.run(query, self.cache, step, out, *self.scales, self.clamps_ranges)
        used = sum(len(x) for x in self.q)
        assert (out[used + self.padded_tokens :] == UNTOUCHED).all()
        return out[:used].cpu()

    def expected(self, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        """Attention by the formula, fp64. `keys`, `values`: of every request, `[kv_len, kv_heads, head_size]`."""
        requests = enumerate(zip(self.q, keys, values, strict=True))
        return torch.cat([self._formula(i, q, k, v) for i, (q, k, v) in requests])

    def _formula(self, request: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layer, bias = self.layer, 0.0
        position, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
        if self.slopes is not None:
            bias = torch.tensor(self.slopes).double()[:, None, None] * (key - position)
        kept = seen(len(q), len(k), self.causal, layer.window_left)
        for first, last in (self.images or {}).get(request, ()):
            both = (key >= first) & (key <= last) & (position >= first) & (position <= last)
            if self.clamps_ranges:
                both &= key >= position - layer.window_left
            kept |= both
        return attention(q, k, v, kept, layer.scale, layer.soft_cap or 0.0, self.sinks, bias)[0]
