"""The wgmma kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa3 import tiles
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.host.family import TiledFamily
from cute_attn.kernels.host.persistent.family import family
from cute_attn.kernels.host.persistent.variant import PersistentKernels


def choose(
    arch: str,
    head_dims: tuple[int, int],
    plain: bool,
    kv: str,
    *,
    full: bool,
    fp8: bool,
    fp8_kv: bool,
    window_left: int,
    size: str,
    group: int,
) -> HopperTile:
    """Returns the tile of a problem. There is one architecture."""
    return tiles.choose(head_dims, plain, kv, fp8, fp8_kv, window_left, size, causal=not full, group=group)


KERNELS: PersistentKernels[HopperTile] = PersistentKernels(
    "fa3", Fa3Spec, tiles.page_source, choose, tiles.PACKED_WINDOWS, tiles.rope_tile, cuts_last_wave=True
)
FAMILY: TiledFamily[HopperTile] = family(KERNELS)
