"""The wgmma kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa3.host import batch, single
from cute_attn.kernels.fa3.host.prepared import prepared_kernel
from cute_attn.kernels.fa3.host.variant import spec_of, specs
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.host.family import TiledFamily

FAMILY: TiledFamily[HopperTile] = TiledFamily("fa3", specs, spec_of, single.Scheduler, batch.schedule, prepared_kernel)
