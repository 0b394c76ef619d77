"""Specs of the decode kernel for problems of given features."""

from __future__ import annotations

from cute_attn.kernels.host.features import kv_dtype
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.kernels.xqa.umma import tiles as umma_tiles
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec
from cute_attn.problem import Features, short
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec


def is_few(batch_size: int, features: Features) -> bool:
    """Tells whether there are few pairs of a request and a kv head, whose keys are then split into many parts each."""
    return batch_size * features.num_kv_heads <= tiles.FEW


def choose_spec(features: Features, qo_len: int, few: bool, arch: Arch) -> XqaSpec | XqaUmmaSpec:
    """Returns the kernel for `qo_len` query tokens per request. `few`: as `is_few` says."""
    rows = qo_len * (features.num_qo_heads // features.num_kv_heads)
    dtypes = short(features.q_dtype), kv_dtype(features), short(features.o_dtype)
    if umma_tiles.supports(dtypes[1], features.head_dim_qk, rows, arch):
        return umma_tiles.choose(*dtypes, features.head_dim_qk, rows, features.draft_mask, arch)
    return tiles.choose(*dtypes, features.head_dim_qk, rows, features.draft_mask, few, arch)


def specs(features: Features, arch: Arch) -> list[KernelSpec]:
    """Returns every kernel that calls of one query token and of these features may need."""
    return list(dict.fromkeys(choose_spec(features, 1, few, arch) for few in (True, False)))
