"""The wgmma kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa3.host.batch import batch_tiling
from cute_attn.kernels.fa3.host.prepared import prepared_kernel
from cute_attn.kernels.fa3.host.single import Scheduler
from cute_attn.kernels.fa3.host.variant import spec_of, specs
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.host.family import TiledFamily

FAMILY: TiledFamily[HopperTile] = TiledFamily("fa3", specs, spec_of, Scheduler, batch_tiling, prepared_kernel)
