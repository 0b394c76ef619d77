"""The tcgen05 kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa4 import tiles
from cute_attn.kernels.fa4.spec import BlackwellTile, Fa4Spec
from cute_attn.kernels.host.persistent.family import PersistentFamily

FAMILY: PersistentFamily[BlackwellTile] = PersistentFamily("fa4", Fa4Spec, tiles.page_source, tiles.rule_of)
