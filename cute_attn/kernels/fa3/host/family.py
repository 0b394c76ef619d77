"""The wgmma kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa3 import tiles
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.host.persistent.family import PersistentFamily

FAMILY: PersistentFamily[HopperTile] = PersistentFamily(
    "fa3", Fa3Spec, tiles.page_source, lambda arch, problem: tiles.rule_of(problem), packs_any_group=True
)
