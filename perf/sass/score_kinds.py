"""Operands whose scores are flat, realistic, rising, falling or leaping, in the order in which kernels process keys.

Scores are deviations, of random normal numbers, plus levels: log2 units (of exp2 in the softmax) that depend on the key
and on the row modulo 32, the lane of its warp. Both come from the same products of q and k: a column per lane holds the
levels, the others the deviations. Kernels process kv tiles from the last one to the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from perf.sass.work import STEP

LANES = 32
SINK = 10.0  # log2 units of the first token
RECENCY = 2**-6 * math.log2(math.e)  # log2 units per token: a slope of ALiBi's, of head 6 of 8
LARGEST_VALUE = 2.0  # so that an output's rounding to bfloat16 stays small

Levels = Callable[[torch.Tensor, torch.Generator], torch.Tensor]  # age of the keys, 0 of the last: levels [LANES, keys]


def level(_age: torch.Tensor, _generator: torch.Generator) -> torch.Tensor:
    return torch.zeros(LANES, len(_age))


def ramp(slope: float) -> Levels:
    """Returns levels that rise by `slope` log2 units with every earlier kv tile: so in the order of processing."""
    return lambda age, _: (age * (slope / STEP)).expand(LANES, -1)


def leaps(age: torch.Tensor, _generator: torch.Generator) -> torch.Tensor:
    return (10.0 * (age // STEP)).expand(LANES, -1)


def outliers(share: float, low: float, high: float) -> Levels:
    """Returns levels of which each lane has its own few, a share of the keys, by `low` to `high` above the others."""

    def levels(age: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        chosen, height = torch.rand(2, LANES, len(age), generator=generator)
        return (chosen < share) * (low + (high - low) * height)

    return levels


FEW = outliers(0.01, 4.0, 12.0)


def sink(age: torch.Tensor, _generator: torch.Generator) -> torch.Tensor:
    return (SINK * (age == age.max())).expand(LANES, -1)


def recency(age: torch.Tensor, _generator: torch.Generator) -> torch.Tensor:
    return (-RECENCY * age).expand(LANES, -1)


def realistic(age: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns levels with outliers above a recency slope, and a sink."""
    first = sink(age, generator)
    return torch.where(first > 0, first, FEW(age, generator) + recency(age, generator))


@dataclass(frozen=True)
class ScoreKind:
    """Kind of scores. `deviation`: of the scores as softmax takes them, in terms of exp, beside their levels."""

    deviation: float
    levels: Levels = level

    def operands(
        self, qo_len: int, kv_len: int, head_dims: tuple[int, int], seed: int, keys: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q, k and v in bfloat16, `[tokens, 1, head_dim]`, of a request of `kv_len` keys, without all but the
        last `keys` keys, which are processed first.
        """
        generator = torch.Generator().manual_seed(seed)
        d_qk, d_vo = head_dims
        noise, scale = d_qk - LANES, math.sqrt(d_qk)  # the inverse of sm_scale
        q = torch.nn.functional.one_hot(torch.arange(qo_len) % LANES, LANES).float()
        k = scale * math.log(2.0) * self.levels(torch.arange(kv_len).flip(0).float(), generator).T
        q_noise, k_noise = (torch.randn(tokens, noise, generator=generator) for tokens in (qo_len, kv_len))
        q = torch.cat((q, q_noise * (self.deviation * scale / math.sqrt(noise))), 1)
        v = torch.randn(kv_len, d_vo, generator=generator).clamp(-LARGEST_VALUE, LARGEST_VALUE)
        k, v = torch.cat((k, k_noise), 1)[-keys:], v[-keys:]
        return q[:, None].bfloat16(), k[:, None].bfloat16(), v[:, None].bfloat16()


KINDS = {
    "normal": ScoreKind(1),
    "wide": ScoreKind(3),
    "wider": ScoreKind(10),
    "outliers": ScoreKind(1, FEW),
    "needles": ScoreKind(1, outliers(1 / 1024, 12.0, 20.0)),
    "sink": ScoreKind(1, sink),
    "recency": ScoreKind(1, recency),
    "realistic": ScoreKind(1, realistic),
    "rising1": ScoreKind(1, ramp(1)),
    "rising4": ScoreKind(1, ramp(4)),
    "rising9": ScoreKind(1, ramp(9)),
    "leaps": ScoreKind(1, leaps),
    "falling4": ScoreKind(1, ramp(-4)),
}
REALISTIC = ("normal", "wide", "outliers", "needles", "sink", "recency", "realistic")  # by which a form is chosen


def exponents(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Returns log2 of the exponentials of a request's scores, `[qo_len, kv_len]` in fp64, last key first."""
    scores: torch.Tensor = q[:, 0].double() @ k[:, 0].double().T
    return scores.flip(1) * (math.log2(math.e) / math.sqrt(q.shape[-1]))
