"""Specs of the decode kernel that the compile gate builds."""

from __future__ import annotations

import itertools

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.xqa.spec import HEAD_DIMS, XqaSpec
from cute_attn.kernels.xqa.tiles import choose, rules
from cute_attn.kernels.xqa.umma import tiles as umma_tiles
from cute_attn.kernels.xqa.umma.spec import HEAD_DIMS as UMMA_HEAD_DIMS
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec
from cute_attn.runtime.arch import Arch

# Of e5m2, which takes fewer instructions than e4m3, 8 rows.
ALL = tuple(key for key in itertools.product(HEAD_DIMS, KV_BITS, (8, 16)) if key[1:] != ("float8_e5m2", 16))
# Head dims that fewer models have: the narrowest, one of padded rows and one of two warps.
OTHERS = (
    *((32, "", 8), (32, "float8_e4m3fn", 8), (80, "float8_e4m3fn", 8)),
    *((512, "", 8), (512, "float8_e4m3fn", 8), (512, "nvfp4", 8)),
)


def default_specs(arch: Arch) -> list[XqaSpec | XqaUmmaSpec]:
    """Kernels that most programs need: bf16 queries over every cache dtype, without a tree; of many rows with one."""
    specs = (
        choose("bfloat16", kv, "bfloat16", head_dim, rows, False, rule, arch, num_kv_heads)
        for head_dim, kv, rows in (*ALL, *OTHERS)
        for rule in rules(arch, KV_BITS[kv], head_dim)
        for num_kv_heads in (1, 8)
    )
    return [*dict.fromkeys(specs), *umma_specs(arch)]


def umma_specs(arch: Arch) -> list[XqaUmmaSpec]:
    """Kernels on tcgen05, where an architecture has it."""
    if arch.name not in umma_tiles.ARCHS:
        return []
    keys = itertools.product(UMMA_HEAD_DIMS, ("", "float8_e4m3fn"), (16, 32, 64), (False, True))
    return [
        umma_tiles.choose("bfloat16", kv, "bfloat16", dim, rows, tree, arch)
        for dim, kv, rows, tree in keys
        if umma_tiles.ONE_READ_ROWS[dim] < rows <= umma_tiles.MAX_ROWS[dim]
    ]
