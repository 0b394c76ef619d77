"""A token pool and a table of slots as SGLang fills it, and an fp64 oracle. Needs no SGLang."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from cute_attn.integrations.sglang import limits
from cute_attn.integrations.sglang.metadata import LayerKind, PageTables
from cute_attn.integrations.sglang.steps import PlannedAttention
from tests.support.engine_case import Batch, Tokens

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


LATENT_LAYERS = [Layer(qk_head_dim=qk, v_head_dim=vo) for qk, vo in (limits.ABSORBED, limits.DECOMPRESSED)]


class Server:
    """A pool and a table of slots as SGLang fills it, with -1 where there is no token. `q_lens`: query tokens of each
    request, 1 by default.
    """

    def __init__(
        self,
        page_size: int,
        kv_lens: list[int],
        device: str = "cpu",
        dtype: torch.dtype = BF16,
        seed: int = 0,
        q_lens: list[int] | None = None,
    ) -> None:
        self.page_size, self.kv_lens, self.q_lens = page_size, kv_lens, q_lens or [1] * len(kv_lens)
        lengths = {"q_lens": self.q_lens, "kv_lens": kv_lens, "num_pages": 512 // page_size}
        formats = {"heads": (HEADS, KV_HEADS), "dim": DIM, "page_size": page_size, "kv_dtype": dtype}
        self.tokens = Tokens(Batch(**lengths, **formats, seed=seed), device)
        self.slots = torch.full((8, MAX_CONTEXT), -1, dtype=torch.int32)
        self.requests = torch.tensor([5, 2, 7][: len(kv_lens)], device=device)
        for request, slots in zip(self.requests.tolist(), self.tokens.pages.slots, strict=True):
            self.slots[request, : len(slots)] = slots.int()
        self.slots, self.q, self.seq_lens = self.slots.to(device), self.tokens.q, self.tokens.seq_lens.long()
        self.cache = self.tokens.caches()

    def check(
        self, out: torch.Tensor, kind: LayerKind, among: Any = None, k_scale: float = 1.0, **options: Any
    ) -> None:
        """Compare a layer's output with attention in fp64. `among`: which drafts of a request see which."""
        keep = None
        if among is not None:
            keep = [torch.cat((torch.ones(len(among), n - len(among)), among), 1) for n in self.kv_lens]
        mask = {"causal": kind.causal, "window_left": kind.window_left, "soft_cap": kind.soft_cap, "keep": keep}
        expected, _ = self.tokens.expected(kind.sm_scale * k_scale, **mask, **options)
        torch.testing.assert_close(out.double().cpu(), expected, rtol=1 / 128, atol=1 / 128)


KINDS = {
    "full": LayerKind.of(Layer()),
    "window": LayerKind.of(Layer(sliding_window_size=10)),
    "capped": LayerKind.of(Layer(logit_cap=2.0)),
    "encoder": LayerKind.of(Layer(attn_type=SimpleNamespace(value="encoder_only"))),
}


def begin(server: Server, attention: PlannedAttention, **options: Any) -> None:
    """Start a step over the pages of a server's requests."""
    pools = [PageTables(server.slots, server.page_size)]
    attention.begin(pools, server.requests, server.seq_lens, server.q_lens, server.kv_lens, **options)
