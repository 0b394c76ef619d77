"""The mma.sync kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa2.host.prepared import Fa2Kernel
from cute_attn.kernels.fa2.host.variant import request_launch, spec, specs, tiling
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host.family import TiledFamily

FAMILY: TiledFamily[Tile] = TiledFamily("fa2", specs, spec, tiling, request_launch, Fa2Kernel)
