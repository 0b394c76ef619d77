"""The wgmma kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa3 import tiles
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.host.family import TiledFamily
from cute_attn.kernels.host.persistent.batch import family
from cute_attn.kernels.host.persistent.variant import PersistentKernels

KERNELS: PersistentKernels[HopperTile] = PersistentKernels(
    "fa3", Fa3Spec, tiles.page_source, lambda arch, problem: tiles.choose(problem), packs_any_group=True
)
FAMILY: TiledFamily[HopperTile] = family(KERNELS)
