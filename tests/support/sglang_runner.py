"""SGLang's own pools, layers and batches on a CPU, with a small stand-in for its model runner. Imports sglang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context

MAX_CONTEXT = 256
MAX_REQUESTS = 6
POOL_TOKENS = 1024
HEADS = (4, 2)
HEAD_DIM = 64


@contextmanager
def settings(**fields: Any) -> Iterator[None]:
    """Publish SGLang's settings, as its scheduler does before it builds a model runner."""
    with get_context().override_server_args(device="cpu", **fields):
        yield


def layer(layer_id: int = 0, **options: Any) -> RadixAttention:
    """An attention layer of `HEADS` and `HEAD_DIM`."""
    heads, kv_heads = HEADS
    return RadixAttention(heads, HEAD_DIM, HEAD_DIM**-0.5, kv_heads, layer_id, **options)


def token_pool(page_size: int, num_layers: int, dtype: torch.dtype) -> MHATokenToKVPool:
    """A pool of `POOL_TOKENS` and one more page, as SGLang makes it."""
    return MHATokenToKVPool(
        size=POOL_TOKENS,
        page_size=page_size,
        dtype=dtype,
        head_num=HEADS[1],
        head_dim=HEAD_DIM,
        layer_num=num_layers,
        device="cpu",
        enable_memory_saver=False,
    )


def window_pool(page_size: int, window_layers: Sequence[int], full_layers: Sequence[int]) -> SWAKVPool:
    """Two pools; page p of the full one is page p // 2 + 1 of the other for the pages that the tests use."""
    pool = SWAKVPool(
        size=POOL_TOKENS,
        size_swa=POOL_TOKENS,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_num=HEADS[1],
        head_dim=HEAD_DIM,
        swa_attention_layer_ids=list(window_layers),
        full_attention_layer_ids=list(full_layers),
        device="cpu",
    )
    pages = torch.randperm(POOL_TOKENS // page_size, generator=torch.Generator().manual_seed(5)) + 1
    slots = pages[:, None] * page_size + torch.arange(page_size)
    dummy = torch.zeros(page_size, dtype=torch.int64)
    pool.register_mapping(torch.cat((dummy, slots.flatten(), torch.tensor([-1]))))
    return pool


class Runner:
    """What an attention backend reads of SGLang's ModelRunner, and the requests of a server."""

    def __init__(self, layers: Sequence[RadixAttention], page_size: int, pool: Any = None, **options: Any) -> None:
        self.model = torch.nn.ModuleList(layers)
        self.page_size = page_size
        self.device = "cpu"
        self.dtype = torch.bfloat16
        self.req_to_token_pool = ReqToTokenPool(MAX_REQUESTS, MAX_CONTEXT, "cpu", enable_memory_saver=False)
        self.token_to_kv_pool = token_pool(page_size, len(layers), torch.bfloat16) if pool is None else pool
        self.model_config = SimpleNamespace(
            is_encoder_decoder=False, attention_chunk_size=None, context_len=MAX_CONTEXT
        )
        self.use_mla_backend = False
        self.is_draft_worker = False
        self.kv_index_translator = None
        for name, value in options.items():
            setattr(self, name, value)
        order = torch.randperm(POOL_TOKENS // page_size, generator=torch.Generator().manual_seed(3)) + 1
        self._free_pages = order.tolist()
        self._lens: dict[int, int] = {}

    def grow(self, request: int, tokens: int) -> torch.Tensor:
        """Give a request slots for more tokens, page by page, and return the slots."""
        rows, page = self.req_to_token_pool.req_to_token, self.page_size
        start = self._lens.get(request, 0)
        for position in range(start, start + tokens):
            if position % page == 0:
                rows[request, position] = self._free_pages.pop() * page
            else:
                rows[request, position] = rows[request, position - 1] + 1
        self._lens[request] = start + tokens
        return rows[request, start : start + tokens].long()

    def extend(
        self, requests: Sequence[int], new: Sequence[int], mode: ForwardMode = ForwardMode.EXTEND
    ) -> ForwardBatch:
        """A batch that appends `new` tokens to each request."""
        cached = [self._lens.get(request, 0) for request in requests]
        loc = torch.cat([self.grow(request, n) for request, n in zip(requests, new, strict=True)])
        batch = self._batch(mode, requests, loc)
        batch.extend_num_tokens = sum(new)
        batch.extend_seq_lens = torch.tensor(new, dtype=torch.int32)
        batch.extend_prefix_lens = torch.tensor(cached, dtype=torch.int32)
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = list(new), cached
        return batch

    def decode(self, requests: Sequence[int], host_lengths: bool = True) -> ForwardBatch:
        """A batch that appends a token to each request."""
        loc = torch.cat([self.grow(request, 1) for request in requests])
        batch = self._batch(ForwardMode.DECODE, requests, loc)
        if not host_lengths:
            batch.seq_lens_cpu = None
        return batch

    def verify(self, requests: Sequence[int], spec_info: Any) -> ForwardBatch:
        """A batch that verifies drafts: its lengths do not count them, its slots do."""
        lens = [self._lens[request] for request in requests]
        loc = torch.cat([self.grow(request, spec_info.draft_token_num) for request in requests])
        batch = self._batch(ForwardMode.TARGET_VERIFY, requests, loc, lens)
        batch.spec_info = spec_info
        return batch

    def _batch(
        self, mode: ForwardMode, requests: Sequence[int], loc: torch.Tensor, lens: Sequence[int] | None = None
    ) -> ForwardBatch:
        seq_lens = torch.tensor([self._lens[request] for request in requests] if lens is None else lens)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            input_ids=torch.zeros(len(loc), dtype=torch.int64),
            req_pool_indices=torch.tensor(requests),
            seq_lens=seq_lens,
            out_cache_loc=loc,
            seq_lens_sum=int(seq_lens.sum()),
            seq_lens_cpu=seq_lens.clone(),
        )
