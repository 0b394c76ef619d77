"""Kernels and tiles of latent attention, by architecture, query rows and shared memory."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from cute_attn.kernels.formats import DTYPES
from cute_attn.kernels.mla.smem import MlaMemory
from cute_attn.kernels.mla.spec import KV_DTYPES, LATENT, AnyMlaSpec, CacheForm, HopperMlaSpec, MlaSpec
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


def choose(dtype: str, form: CacheForm, rows: int, arch: Arch) -> AnyMlaSpec:
    """Return the kernel for requests of so many packed query rows."""
    if arch.name == HOPPER:
        return HopperMlaSpec(**_key(dtype, form))
    return choose_tile(dtype, form, rows, arch)


def choose_tile(dtype: str, form: CacheForm, rows: int, arch: Arch) -> MlaSpec:
    """Return the kernel on mma.sync."""
    specs = (MlaSpec(**_key(dtype, form), **tile._asdict()) for tile in TILES[form.kv_dtype])
    fitting = [spec for spec in specs if MlaMemory(spec).bytes <= arch.smem_limit]
    most = max(spec.rows for spec in fitting)
    return next(spec for spec in fitting if spec.rows >= min(rows, most))


def _key(dtype: str, form: CacheForm) -> dict[str, Any]:
    return {"dtype": dtype, "out_dtype": dtype, "head_dim": LATENT, **form._asdict()}


ROWS = (16, 32, 64)
NARROW = KV_DTYPES[1]
COMMON = CacheForm(), CacheForm(NARROW, 8)
OTHERS = CacheForm("", 0), CacheForm(NARROW, 0, True), CacheForm(NARROW, 16, True)
ROTATED = (*COMMON, CacheForm(NARROW, 8, True), CacheForm(NARROW, 16, True))  # what caches of models hold


def default_specs(arch: Arch) -> list[AnyMlaSpec]:
    """Kernels of all tiles that an architecture has room for; of forms of caches that are rare, one tile each."""
    keys = (*itertools.product(DTYPES, COMMON, ROWS), *itertools.product(("bfloat16",), OTHERS, (16,)))
    return list(dict.fromkeys(choose(*key, arch) for key in keys))


def specs_of_cache(dtype: str, kv_dtype: str, arch: Arch) -> list[AnyMlaSpec]:
    """Kernels for caches of this type ("": that of the queries), for any number of query rows; none for other types."""
    forms = [form for form in ROTATED if form.kv_dtype == kv_dtype]
    return list(dict.fromkeys(choose(dtype, *key, arch) for key in itertools.product(forms, ROWS)))
