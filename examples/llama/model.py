"""A Llama in plain torch. It knows nothing of requests, pages or kernels: attention is a function that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

# (layer, q, k, v) -> o, where q and o are [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of a model. Raises ValueError for sizes that do not fit together."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    rope_theta: float = 500_000.0

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden must be a multiple of twice the {self.heads} heads, got {self.hidden}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of the {self.kv_heads} kv_heads, got {self.heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def rotated_dim(self) -> int:
        return self.head_dim


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, config: Any, dtype: torch.dtype, index: int) -> None:
        super().__init__()
        self.index = index
        hidden, inner = config.hidden, config.hidden * 7 // 2
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5, dtype=dtype)
        self.add_projections(config, dtype)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5, dtype=dtype)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False, dtype=dtype)
        self.down = nn.Linear(inner, hidden, bias=False, dtype=dtype)

    def add_projections(self, config: Any, dtype: torch.dtype) -> None:
        """Add the weights of attention."""
        self.head_dim, hidden = config.head_dim, config.hidden
        self.heads = [config.heads, config.kv_heads, config.kv_heads]  # of q, k and v
        self.qkv = nn.Linear(hidden, sum(self.heads) * config.head_dim, bias=False, dtype=dtype)
        self.out = nn.Linear(hidden, hidden, bias=False, dtype=dtype)

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor], attention: Callable[..., Tensor]) -> Tensor:
        """Compute what attention adds to the residual stream."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)
        o = attention(self.index, rotated(q, *rope), rotated(k, *rope), v)
        return self.out(o.flatten(1))

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], attention: Callable[..., Tensor]) -> Tensor:
        hidden = hidden + self.attend(self.attention_norm(hidden), rope, attention)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to `[tokens, heads, head_dim]`: dimension i is paired with i + head_dim / 2."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Llama(nn.Module):
    """The model with random weights. Models with other attention have another `layer_type` and `config`.

    Tokens of several requests lie one after the other, without padding and without a batch axis: `tokens` and
    `positions` are `[num_tokens]`. Only attention needs to know where a request begins.
    """

    layer_type: ClassVar[type[Layer]] = Layer

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        with torch.device(device):
            self.embedding = nn.Embedding(config.vocab, config.hidden, dtype=dtype)
            self.layers = nn.ModuleList(self.layer_type(config, dtype, i) for i in range(config.layers))
            self.norm = nn.RMSNorm(config.hidden, eps=1e-5, dtype=dtype)
            self.head = nn.Linear(config.hidden, config.vocab, bias=False, dtype=dtype)
            exponents = torch.arange(0, config.rotated_dim, 2) / config.rotated_dim
            self.rope_frequencies = config.rope_theta**-exponents
        self.requires_grad_(False)
        self._randomize(torch.Generator(device).manual_seed(seed))

    def forward(self, tokens: Tensor, positions: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        """Compute the hidden state of every token, `[num_tokens, hidden]`."""
        angles = positions[:, None] * self.rope_frequencies
        rope = angles.cos()[:, None], angles.sin()[:, None]
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rope, attention)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute fp32 logits `[rows, vocab]`."""
        return self.head(hidden).float()

    def _randomize(self, generator: torch.Generator) -> None:
        """Draw weights that keep activations near 1; q, k and v are larger, so that attention decides the tokens."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                size = 1.0 if "embedding" in name else weight.shape[1] ** -0.5
                weight.normal_(0, 1.5 * size if "qkv" in name else size, generator=generator)
