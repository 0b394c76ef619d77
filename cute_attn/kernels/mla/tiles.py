"""Kernels and tiles of latent attention, by architecture, query rows and shared memory."""

from __future__ import annotations

from typing import NamedTuple

from cute_attn.kernels.mla.smem import MlaMemory
from cute_attn.kernels.mla.spec import LATENT, AnyMlaSpec, HopperMlaSpec, MlaSpec
from cute_attn.runtime.arch import Arch

HOPPER = "sm_90a"  # the architecture with wgmma


class Tile(NamedTuple):
    """Packed query rows of a CTA by tokens, and who holds them."""

    rows: int
    cols: int
    stages: int
    warps: int


# The first tile that fits applies, of those with enough rows; without any, the last one that fits, several times.
# In 227 KB, in 163 KB and in 99 KB, where 64 rows leave no room for two tiles.
TILES = {
    "": (
        *(Tile(16, 64, 2, 8), Tile(16, 32, 3, 4), Tile(16, 32, 2, 4)),
        *(Tile(32, 64, 2, 8), Tile(32, 32, 3, 8), Tile(32, 16, 3, 4)),
        *(Tile(64, 64, 2, 8), Tile(64, 32, 2, 8)),
    ),
    "float8_e4m3fn": (
        *(Tile(16, 64, 3, 8), Tile(16, 32, 4, 4), Tile(16, 32, 2, 4)),
        *(Tile(32, 64, 3, 8), Tile(32, 32, 4, 8), Tile(32, 16, 4, 4)),
        *(Tile(64, 64, 2, 8), Tile(64, 32, 2, 8)),
    ),
}


def choose(dtype: str, kv_dtype: str, rows: int, arch: Arch, one_scale: bool = True) -> AnyMlaSpec:
    """Return the kernel for requests of so many packed query rows. `one_scale`: products of latent and of rotated
    columns have the same, which products of 16-bit caches on wgmma need."""
    if arch.name == HOPPER and (one_scale or kv_dtype):
        return HopperMlaSpec(dtype, kv_dtype, dtype, LATENT)
    return choose_tile(dtype, kv_dtype, rows, arch)


def choose_tile(dtype: str, kv_dtype: str, rows: int, arch: Arch) -> MlaSpec:
    """Return the kernel on mma.sync."""
    specs = (MlaSpec(dtype, kv_dtype, dtype, LATENT, **tile._asdict()) for tile in TILES[kv_dtype])
    fitting = [spec for spec in specs if MlaMemory(spec).bytes <= arch.smem_limit]
    most = max(spec.rows for spec in fitting)
    return next(spec for spec in fitting if spec.rows >= min(rows, most))
