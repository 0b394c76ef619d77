"""The mma.sync kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa2.host import batch, single
from cute_attn.kernels.fa2.host.prepared import prepared_kernel
from cute_attn.kernels.fa2.host.variant import spec_of, specs
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host.family import TiledFamily

FAMILY: TiledFamily[Tile] = TiledFamily("fa2", specs, spec_of, single.Scheduler, batch.schedule, prepared_kernel)
