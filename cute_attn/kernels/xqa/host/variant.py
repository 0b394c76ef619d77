"""Which decode kernel runs a request."""

from __future__ import annotations

from cute_attn.kernels.host.features import kv_dtype
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.problem import Features, short
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec


def is_few(batch_size: int, features: Features) -> bool:
    """Few pairs of a request and a kv head: each is cut into many parts."""
    return batch_size * features.num_kv_heads <= tiles.FEW


def choose_spec(features: Features, qo_len: int, few: bool, arch: Arch) -> XqaSpec:
    """The kernel for `qo_len` query tokens per request; `few` as `is_few` says."""
    f = features
    rows = qo_len * (f.num_qo_heads // f.num_kv_heads)
    types = short(f.q_dtype), kv_dtype(f), short(f.o_dtype)
    return tiles.choose(*types, f.head_dim_qk, rows, f.draft_mask, few, arch)


def specs(features: Features, arch: Arch) -> list[KernelSpec]:
    """Every kernel that calls of one query token and of these features may need."""
    return list(dict.fromkeys(choose_spec(features, 1, few, arch) for few in (True, False)))
