"""Specs of the kernel for latent attention that the compile gate builds."""

from __future__ import annotations

import itertools

from cute_attn.kernels.formats import DTYPES
from cute_attn.kernels.mla.spec import KV_DTYPES, AnyMlaSpec
from cute_attn.kernels.mla.tiles import choose
from cute_attn.runtime.arch import Arch


def default_specs(arch: Arch) -> list[AnyMlaSpec]:
    """Kernels of all tiles that an architecture has room for."""
    keys = itertools.product(DTYPES, KV_DTYPES, (16, 32, 64))
    specs = (choose(*key, arch, one_scale) for key in keys for one_scale in (True, False))
    return list(dict.fromkeys(specs))
