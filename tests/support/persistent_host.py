"""Families of persistent kernels under test, and requests for their host code."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_attn.kernels.fa3.host import family as fa3
from cute_attn.kernels.fa4.host import family as fa4
from cute_attn.kernels.host.persistent.family import PersistentFamily
from cute_attn.problem import Problem
from cute_attn.request import single as single_request
from cute_attn.runtime.arch import Arch, named


class Target(NamedTuple):
    """A family on an architecture."""

    name: str
    arch: Arch
    family: PersistentFamily[Any]


TARGETS = (
    Target("fa3", named("sm_90a"), fa3.FAMILY),
    Target("fa4", named("sm_100a"), fa4.FAMILY),
)


def single(
    qo_len: int = 100, kv_len: int = 300, heads: tuple[int, int] = (8, 2), dim: int = 64, **rest: Any
) -> Problem:
    q = torch.zeros(qo_len, heads[0], dim).half()
    kv = (heads[1], kv_len) if rest.get("kv_layout") == "HND" else (kv_len, heads[1])
    k, v = torch.zeros(2, *kv, dim).half()
    return single_request.problem(single_request.Call(q, k, v, return_lse=True, **rest))
