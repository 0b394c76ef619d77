"""What all roles of the decode kernel on tcgen05 share: rings, and the tiles of a segment that the CTA processes."""

from collections.abc import Mapping
from dataclasses import dataclass

from cutlass import Int32

from cute_attn.kernels.blocks.pipeline import Ring, rings_at
from cute_attn.kernels.xqa.parts.partition import KvSplit, Segment
from cute_attn.kernels.xqa.umma.smem import UmmaMemory


@dataclass(frozen=True)
class UmmaShared:
    """Shared memory of the CTA."""

    memory: UmmaMemory
    base: Int32

    @property
    def rings(self) -> Mapping[str, Ring]:
        return rings_at(self.memory.map, self.base)

    def ring(self, name: str) -> Ring:
        return self.rings[name]

    def scratch(self, name: str) -> Int32:
        return self.base + Int32(self.memory.map.offset(name))


def first_tile(segment: Segment, split: KvSplit, cols: int) -> Int32:
    """Tile of the cache in which the CTA's split of a segment begins."""
    return split.begin + segment.request.first_token // cols


def tile_count(split: KvSplit) -> Int32:
    return split.end - split.begin
