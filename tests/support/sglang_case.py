"""A token pool with random contents and a table of slots as SGLang fills it, and an fp64 oracle. Needs no SGLang."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from cute_attn.integrations.sglang.metadata import LayerKind, PageTables, as_pages, lengths
from cute_attn.integrations.sglang.planned import PlannedAttention, Step
from tests.support.dense_attention import attention, seen

BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM = 4, 2, 64
MAX_CONTEXT = 128


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is read of a RadixAttention."""

    layer_id: int = 0
    tp_q_head_num: int = HEADS
    tp_k_head_num: int = KV_HEADS
    qk_head_dim: int = DIM
    v_head_dim: int = DIM
    scaling: float = DIM**-0.5
    logit_cap: float = 0.0
    sliding_window_size: int | None = -1
    attn_type: Any = "decoder"
    is_cross_attention: bool = False
    pos_encoding_mode: str = "NONE"
    logit_capping_method: str = "tanh"
    xai_temperature_len: int = -1


class Server:
    """A pool with random contents and a table of slots as SGLang fills it, with -1 where there is no token."""

    def __init__(
        self, page_size: int, kv_lens: list[int], device: str = "cpu", dtype: torch.dtype = BF16, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(page_size + seed)
        self.page_size, self.kv_lens, self.device = page_size, kv_lens, device
        pages = torch.randperm(512 // page_size, generator=generator) + 1
        self.slots = torch.full((8, MAX_CONTEXT), -1, dtype=torch.int32)
        self.requests = torch.tensor([5, 2, 7][: len(kv_lens)], device=device)
        for request, kv_len in zip(self.requests.tolist(), kv_lens, strict=True):
            count = -(-kv_len // page_size)
            own, pages = pages[:count], pages[count:]
            slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()
            self.slots[request, :kv_len] = slots[:kv_len].int()
        self.slots = self.slots.to(device)
        shape = 512 + page_size, KV_HEADS, DIM
        self.buffers = tuple(torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2))

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.kv_lens, device=self.device)

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.buffers
        return as_pages(keys, self.page_size, "NHD"), as_pages(values, self.page_size, "NHD")

    def expected(self, q: torch.Tensor, q_lens: list[int], kind: LayerKind, **options: Any) -> torch.Tensor:
        """Return fp64 attention of all requests; options as for `attend`."""
        rows, first = [], 0
        for request, kv_len, q_len in zip(self.requests.tolist(), self.kv_lens, q_lens, strict=True):
            slots = self.slots[request, :kv_len].long()
            keys, values = (buffer.double()[slots].cpu() for buffer in self.buffers)
            rows.append(attend(q[first : first + q_len].double().cpu(), keys, values, kind, **options))
            first += q_len
        return torch.cat(rows)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kind: LayerKind,
    among: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return fp64 attention of one request. `among`: which of its drafts see which, instead of causality."""
    kept = seen(len(q), len(keys), kind.causal, kind.window_left)
    if among is not None:
        before = torch.ones(len(q), len(keys) - len(q), dtype=torch.bool)
        kept = torch.cat((before, among), 1) & seen(len(q), len(keys), False, kind.window_left)
    return attention(q, keys * k_scale, values * v_scale, kept, kind.sm_scale, kind.soft_cap or 0.0, sinks)[0]


def queries(tokens: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(tokens)).to(BF16).to(device)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1 / 128, atol=1 / 128)


KINDS = {
    "full": LayerKind.of(Layer()),
    "window": LayerKind.of(Layer(sliding_window_size=10)),
    "capped": LayerKind.of(Layer(logit_cap=2.0)),
    "encoder": LayerKind.of(Layer(attn_type=SimpleNamespace(value="encoder_only"))),
}


def begin(server: Server, q_lens: list[int], attention: PlannedAttention, **options: Any) -> None:
    """Start a step over the pages of a server's requests."""
    pages = PageTables(server.slots, server.page_size)
    counted = lengths(q_lens, server.kv_lens, server.page_size)
    step = Step(counted, lambda _: pages.page_indices(server.requests, server.seq_lens, counted.num_pages))
    attention.begin(step, **options)
