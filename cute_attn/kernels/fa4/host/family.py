"""The tcgen05 kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa4 import tiles
from cute_attn.kernels.fa4.spec import BlackwellTile, Fa4Spec
from cute_attn.kernels.host.family import TiledFamily
from cute_attn.kernels.host.persistent.batch import family
from cute_attn.kernels.host.persistent.variant import PersistentKernels

KERNELS: PersistentKernels[BlackwellTile] = PersistentKernels("fa4", Fa4Spec, tiles.page_source, tiles.choose)
FAMILY: TiledFamily[BlackwellTile] = family(KERNELS)
