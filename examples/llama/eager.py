"""Attention written out in torch: it calibrates the scales of an fp8 cache, and checks the tokens of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .batch import Request
from .cache import E4M3, PagedCache, quantized
from .model import Llama

CALIBRATION_TOKENS = 256
HEADROOM = 1.5  # larger numbers than those of the calibration become the largest of fp8
TIE = 16  # epsilons of the dtype: logits that are closer may trade places when sums are rounded in another order


class Verdict(NamedTuple):
    """How tokens compare with those of eager attention."""

    tokens: int
    equal: int
    worst: float  # by how much eager's largest logit exceeds that of the engine's token, at most
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.worst <= self.tolerance


def attention_of(cache: PagedCache) -> Callable[..., Tensor]:
    """Return eager attention of a model over what a cache holds of its keys and values."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_scale, v_scale = cache.scales[layer]
        return eager(q, stored(k, k_scale, cache.dtype), stored(v, v_scale, cache.dtype))

    return attention


@torch.no_grad()
def compare(model: Llama, attention: Callable[..., Tensor], requests: Sequence[Request]) -> Verdict:
    """Compare every generated token with the one that a model with this attention gives for the tokens before it.

    One pass over prompt and output tells the next token at every position. If all are those of the output, then that
    model would have generated the same.
    """
    gaps, device = [], model.head.weight.device
    for request in requests:
        tokens = torch.tensor(request.tokens, device=device)
        hidden = model(tokens[:-1], torch.arange(len(tokens) - 1, device=device), attention)
        logits = model.logits(hidden[len(request.prompt) - 1 :])
        gaps.append(logits.amax(-1) - logits.gather(1, tokens[len(request.prompt) :, None])[:, 0])
    gap = torch.cat(gaps)
    return Verdict(len(gap), int((gap == 0).sum()), float(gap.max()), TIE * torch.finfo(model.dtype).eps)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of one request in fp32: q `[tokens, heads, head_dim]`, k and v with fewer heads."""
    group = q.shape[1] // k.shape[1]
    queries = q.float().transpose(0, 1)
    keys, values = (x.float().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = queries @ keys.mT * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill_(future, -torch.inf).softmax(-1) @ values).transpose(0, 1).to(q.dtype)


def stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return what attention reads from a cache of that dtype after x was written to it."""
    return quantized(x, scale, dtype).float() * scale


@torch.no_grad()
def fp8_scales(model: Llama, seed: int = 0) -> list[tuple[float, float]]:
    """Calibrate k_scale and v_scale of every layer on random tokens; checkpoints for fp8 caches bring theirs."""
    scales = []

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        limit = torch.finfo(E4M3).max / HEADROOM
        scales.append((float(k.abs().max()) / limit, float(v.abs().max()) / limit))
        return eager(q, k, v)

    device, generator = model.head.weight.device, torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab, (CALIBRATION_TOKENS,), generator=generator).to(device)
    model(tokens, torch.arange(CALIBRATION_TOKENS, device=device), attention)
    return scales
