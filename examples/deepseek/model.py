"""A model with latent attention in plain torch. Attention is a function that it is given, with the layer: it decides
whether keys and values are decompressed, or projections absorbed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.llama.model import Layer, Llama, rotated

LATENT, ROPE = 512, 64  # columns of a row of the cache
NOPE, VALUE = 128, 128  # columns of a head's keys without the rotated ones, and of its values


@dataclass(frozen=True)
class Config:
    """Sizes of a model."""

    layers: int
    hidden: int
    heads: int
    q_rank: int  # of the latent space of queries
    vocab: int
    rope_theta: float = 10_000.0

    @property
    def rotated_dim(self) -> int:
        return ROPE


class LatentLayer(Layer):
    """Latent attention and SwiGLU. Attention gets the layer, q `[tokens, heads, 192]`, the tokens' latent rows
    `[tokens, 512]` and their rotated keys `[tokens, 64]`, which all heads share; it gives `[tokens, heads, 128]`.
    """

    def add_projections(self, config: Config, dtype: torch.dtype) -> None:
        """Add the weights of attention: down to the latent spaces of queries and keys, and up from them."""
        self.num_heads, self.ranks = config.heads, [config.q_rank, LATENT, ROPE]
        self.qkv_down = nn.Linear(config.hidden, sum(self.ranks), bias=False, dtype=dtype)
        self.q_norm = nn.RMSNorm(config.q_rank, eps=1e-5, dtype=dtype)
        self.kv_norm = nn.RMSNorm(LATENT, eps=1e-5, dtype=dtype)
        self.q_up = nn.Linear(config.q_rank, config.heads * (NOPE + ROPE), bias=False, dtype=dtype)
        self.kv_up = nn.Linear(LATENT, config.heads * (NOPE + VALUE), bias=False, dtype=dtype)
        self.out = nn.Linear(config.heads * VALUE, config.hidden, bias=False, dtype=dtype)

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor], attention: Callable[..., Tensor]) -> Tensor:
        """Compute what attention adds to the residual stream."""
        q, latent, k_pe = self.qkv_down(x).split(self.ranks, dim=-1)
        q_nope, q_pe = self.q_up(self.q_norm(q)).unflatten(-1, (self.num_heads, -1)).split([NOPE, ROPE], dim=-1)
        q = torch.cat((q_nope, rotated(q_pe, *rope)), dim=-1)
        o = attention(self, q, self.kv_norm(latent), rotated(k_pe[:, None], *rope)[:, 0])
        return self.out(o.flatten(1))

    def decompressed(self, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys `[tokens, heads, 192]` and values `[tokens, heads, 128]` of rows of the cache."""
        k, v = self.kv_up(latent).unflatten(-1, (self.num_heads, -1)).split([NOPE, VALUE], dim=-1)
        return torch.cat((k, k_pe[:, None].expand(-1, self.num_heads, -1)), dim=-1), v

    def absorbed(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries of rows of the cache: q.k = q_nope.(W latent) = (W^T q_nope).latent, and the rotated part."""
        q_nope, q_pe = q.split([NOPE, ROPE], dim=-1)
        return torch.einsum("thd,hdl->thl", q_nope, self._up()[:, :NOPE]), q_pe

    def values(self, o: Tensor) -> Tensor:
        """Return the heads' values of sums of latent rows, `[tokens, heads, 512]`."""
        return torch.einsum("thl,hdl->thd", o, self._up()[:, NOPE:])

    def _up(self) -> Tensor:
        return self.kv_up.weight.unflatten(0, (self.num_heads, -1))


class DeepSeek(Llama):
    """The model with random weights."""

    layer_type = LatentLayer
