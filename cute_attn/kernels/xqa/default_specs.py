"""Specs of the decode kernel that the compile gate builds."""

from __future__ import annotations

import itertools

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.xqa.spec import HEAD_DIMS, XqaSpec
from cute_attn.kernels.xqa.tiles import Segments, choose
from cute_attn.runtime.arch import Arch

ALL = tuple(itertools.product(HEAD_DIMS, KV_BITS, (8, 16)))
# Head dims that fewer models have: the narrowest, one of padded rows and one of two warps.
OTHERS = (
    *((32, "", 8), (32, "float8_e4m3fn", 8), (80, "float8_e4m3fn", 8)),
    *((512, "", 8), (512, "float8_e4m3fn", 8), (512, "nvfp4", 8)),
)


def default_specs(arch: Arch) -> list[XqaSpec]:
    """Kernels that most programs need: bf16 queries over every cache dtype, without a tree."""
    segments: tuple[Segments, ...] = ("few", "many", "short")
    keys = itertools.product((*ALL, *OTHERS), segments)
    specs = (choose("bfloat16", kv, "bfloat16", head_dim, rows, False, of, arch) for (head_dim, kv, rows), of in keys)
    return list(dict.fromkeys(specs))
