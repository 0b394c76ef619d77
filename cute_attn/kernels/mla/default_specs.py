"""Specs of the kernel for latent attention that the compile gate builds."""

from __future__ import annotations

from cute_attn.kernels.formats import DTYPES
from cute_attn.kernels.mla.spec import MlaSpec
from cute_attn.kernels.mla.tiles import choose
from cute_attn.runtime.arch import Arch


def default_specs(arch: Arch) -> list[MlaSpec]:
    """Kernels of all tiles that an architecture has room for."""
    return list(dict.fromkeys(choose(dtype, rows, arch) for dtype in DTYPES for rows in (16, 32, 64)))
