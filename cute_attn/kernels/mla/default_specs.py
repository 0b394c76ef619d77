"""Specs of the kernel for latent attention that the compile gate builds."""

from __future__ import annotations

import itertools

from cute_attn.kernels.formats import DTYPES
from cute_attn.kernels.mla.spec import KV_DTYPES, AnyMlaSpec, CacheForm
from cute_attn.kernels.mla.tiles import choose
from cute_attn.runtime.arch import Arch

NARROW = KV_DTYPES[1]
COMMON = CacheForm(), CacheForm(NARROW, 8)
OTHERS = CacheForm("", 0), CacheForm(NARROW, 0, True), CacheForm(NARROW, 16, True)


def default_specs(arch: Arch) -> list[AnyMlaSpec]:
    """Kernels of all tiles that an architecture has room for; of forms of caches that are rare, one tile each."""
    keys = (*itertools.product(DTYPES, COMMON, (16, 32, 64)), *itertools.product(("bfloat16",), OTHERS, (16,)))
    return list(dict.fromkeys(choose(*key, arch) for key in keys))
