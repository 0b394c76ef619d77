"""A step of vLLM without vLLM: its cache of one layer in either memory order, its batch, and attention by the formula.

Caches are allocated as vLLM does it: blocks in memory order, then permuted to `[blocks, heads, block_size, content]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from cute_attn.integrations.vllm.attention import LayerAttention
from cute_attn.integrations.vllm.metadata import Batch, Sessions, Spans, StepMetadata, split_decodes
from cute_attn.integrations.vllm.support import Layer
from cute_attn.integrations.workspaces import Workspaces
from tests.support import engine_case
from tests.support.dense_attention import assert_near, attention, nvfp4_values, seen
from tests.support.engine_case import BF16, E4M3, E5M2, Tokens, nvfp4_pages
from tests.support.paged_cache import ends, ints

UNTOUCHED = 7.0  # of output rows that no request has
Pair = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
CACHE_DTYPES = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}


@dataclass
class Step:
    """Requests of one step: (query tokens, keys with those of the step). `padding`: requests without tokens."""

    requests: Sequence[tuple[int, int]]
    layer: Layer
    threshold: int = 1
    memory_order: str = "NHD"
    block_size: int = 16
    device: str = "cpu"
    padding: int = 0
    padded_tokens: int = 0
    scales: tuple[float, float] = (1.0, 1.0)
    slopes: Sequence[float] | None = None
    batch_invariant: bool = False
    causal: bool = True
    images: Spans | None = None
    mm_prefix_clamp_sliding_window: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        layer, (q_lens, kv_lens) = self.layer, zip(*self.requests, strict=True)
        formats = {"heads": (layer.num_heads, layer.num_kv_heads), "dim": layer.head_size, "seed": self.seed}
        self.batch = engine_case.Batch(q_lens, kv_lens, page_size=self.block_size, **formats)
        tokens = Tokens(self.batch, "cpu")
        self.q = tokens.q.split(q_lens)
        self.k, self.v = (x.split(kv_lens) for x in tokens.ragged())
        self.tables = pad(tokens.pages.tables(beyond=-1) + 1, (0, 0, 0, self.padding))  # block 0: vLLM's padding
        self._slots = tokens.pages.all_slots() + self.block_size
        self._k_scale_float, self._v_scale_float = self.scales  # as vLLM's layer has them
        self._k_scale, self._v_scale = (torch.tensor(x, device=self.device) for x in self.scales)
        self.cache = self._empty_cache(tokens.num_pages + 1)
        self.sinks = torch.linspace(-1, 2, layer.num_heads) if layer.sinks else None

    def _empty_cache(self, blocks: int) -> torch.Tensor:
        layer, heads, content = self.layer, self.layer.num_kv_heads, 2 * self.layer.head_size
        dtype = torch.uint8 if layer.kv_cache_dtype != "auto" else BF16
        if layer.kv_cache_dtype == "nvfp4":
            heads, content = 2 * heads, layer.head_size // 2 + layer.head_size // 16
        inner = (self.block_size, heads) if self.memory_order == "NHD" else (heads, self.block_size)
        memory = torch.zeros(blocks, *inner, content, dtype=dtype, device=self.device)
        if dtype != torch.uint8:
            memory.fill_(math.nan)  # slots that no token has
        return memory.transpose(1, 2) if self.memory_order == "NHD" else memory

    def slots(self, padding: int = 0) -> torch.Tensor:
        """Slots of all tokens, then -1 for padding rows."""
        return pad(self._slots, (0, padding), value=-1).to(self.device)

    def fill(self, attention: LayerAttention) -> None:
        """Write the keys and values of all requests, with some rows of padding."""
        rows = [padded(x, 2).to(self.device) for x in (self.k, self.v)]
        attention.do_kv_cache_update(self, rows[0], rows[1], self.cache, self.slots(padding=1))

    def metadata(self, emulated: bool = False) -> StepMetadata:
        """The step's metadata, as the builder makes it, with lengths on the device only."""
        q_lens, kv_lens = ([*lens, *[0] * self.padding] for lens in zip(*self.requests, strict=True))
        starts, count, tokens = ends(q_lens), len(q_lens), sum(q_lens) + self.padded_tokens
        on_device = (x.to(self.device) for x in (ints(kv_lens), self.tables))
        batch = Batch(count, starts.to(self.device), starts, *on_device)
        decodes = split_decodes(starts, count, tokens, max(q_lens), self.threshold)
        if emulated:  # the emulator keeps a record of every byte
            workspaces = Workspaces(torch.empty(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8))
        else:
            workspaces = Workspaces.on(torch.device(self.device))
        return StepMetadata(batch, decodes, Sessions(workspaces), self.causal, mm_prefix_range=self.images)

    def attention(self) -> LayerAttention:
        """The layer."""
        capability = torch.cuda.get_device_capability() if self.device == "cuda" else None
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        attention = LayerAttention(self.layer, BF16, capability, self.batch_invariant, sinks)
        attention.process_weights_after_loading(BF16)
        return attention

    def output(self, attention: LayerAttention, step: StepMetadata) -> torch.Tensor:
        """Run the layer: output rows of the requests. Asserts that no row past the query's is written."""
        query = padded(self.q, self.padded_tokens + 3).to(self.device)
        out = torch.full_like(query, UNTOUCHED)
        assert attention.forward(self, query, None, None, self.cache, step, out) is out
        used = sum(len(x) for x in self.q)
        assert (out[used + self.padded_tokens :] == UNTOUCHED).all()
        return out[:used].cpu()

    def check(self, step: StepMetadata | None = None) -> None:
        """Fill the cache, run the layer, and compare its output, and the bytes of an fp8 cache, with the formula."""
        attention, step = self.attention(), step or self.metadata()
        self.fill(attention)
        if dtype := CACHE_DTYPES.get(self.layer.kv_cache_dtype):
            sides = zip((self.k, self.v), self.scales, strict=True)
            rows = torch.cat([(torch.cat([*x]).float() / scale).to(dtype) for x, scale in sides], -1)
            assert torch.equal(self.cache.transpose(1, 2).flatten(0, 1)[self._slots].cpu(), rows.view(torch.uint8))
        assert_near(self.output(attention, step), None, [self.expected()])

    def stored(self) -> Pair:
        """The keys and values of every request in the cache: by the formula of its dtype, of NVFP4 by its bytes."""
        if self.layer.kv_cache_dtype == "nvfp4":
            parts = zip(*nvfp4_pages(self.batch, self.memory_order, self.cache), self.scales, strict=True)
            sides = [nvfp4_values(data, block_scales) * scale for data, block_scales, scale in parts]
            rows = [(x if self.memory_order == "NHD" else x.transpose(1, 2)).flatten(0, 1) for x in sides]
            keys, values = (x[self._slots].split(self.batch.kv_lens) for x in rows)
            return keys, values
        dtype = CACHE_DTYPES.get(self.layer.kv_cache_dtype)
        if dtype is None:
            return self.k, self.v
        pairs = zip((self.k, self.v), self.scales, strict=True)
        k, v = ([(x.float() / scale).to(dtype).double() * scale for x in side] for side, scale in pairs)
        return k, v

    def expected(self, stored: Pair | None = None) -> torch.Tensor:
        """Attention by the formula, fp64. `stored`: keys and values of requests, `[kv_len, kv_heads, head_size]`."""
        layer, outs = self.layer, []
        for i, (q, k, v) in enumerate(zip(self.q, *(stored or self.stored()), strict=True)):
            position, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
            bias: torch.Tensor | float = 0.0
            if self.slopes is not None:
                bias = torch.tensor(self.slopes).double()[:, None, None] * (key - position)
            kept = seen(len(q), len(k), self.causal, layer.window_left)
            for first, last in (self.images or {}).get(i, ()):
                both = (key >= first) & (key <= last) & (position >= first) & (position <= last)
                if self.mm_prefix_clamp_sliding_window:
                    both &= key >= position - layer.window_left
                kept |= both
            outs.append(attention(q, k, v, kept, layer.scale, layer.soft_cap, self.sinks, bias)[0])
        return torch.cat(outs)


def padded(parts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Rows of all requests, and `count` more that no request has."""
    return pad(torch.cat(list(parts)), (0, 0, 0, 0, 0, count), value=9.0)
