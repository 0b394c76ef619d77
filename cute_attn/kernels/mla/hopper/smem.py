"""Shared-memory map of the kernel for latent attention on wgmma. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import BARRIER_BYTES, MemoryMap, MemoryRegion
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.mla.spec import HopperMlaSpec

HALVES = 2  # of a tile
ROTATED = 8  # the column of lines with rotated numbers
RECORD_BYTES = 48  # of a segment, as the producers leave it for the MMA warpgroups


@dataclass(frozen=True)
class HopperMlaMemory(MemoryMap):
    """Two slots of a tile each, the query rows, P, and numbers per row.

    Tiles, query rows and P have columns of lines, one after the other: 128 bytes of all rows, swizzled.
    """

    spec: HopperMlaSpec
    tiles = MemoryRegion(lambda m: m.spec.stages * m.slot_bytes)
    q = MemoryRegion(lambda m: m.columns * m.spec.rows * LINE)
    p = MemoryRegion(lambda m: m.spec.rows * LINE)
    shifts = MemoryRegion(lambda m: 2 * m.spec.rows * 4)  # a negated anchor per row from each MMA warpgroup
    totals = MemoryRegion(lambda m: 2 * m.spec.rows * 4)  # a sum per row from each MMA warpgroup
    # Full and empty barriers of Q, and of both halves of each slot.
    barriers = MemoryRegion(lambda m: 2 * BARRIER_BYTES + HALVES * m.half_barrier_bytes)
    records = MemoryRegion(lambda m: 2 * RECORD_BYTES)  # of segments, used in turn
    ticket = MemoryRegion(lambda m: 16)  # one word: the number of CTAs that had stored their states before this one

    @property
    def columns(self) -> int:
        """Columns of lines of a tile's rows, in 16 bits."""
        return self.spec.columns * 2 // LINE

    @property
    def halves(self) -> tuple[range, ...]:
        """Columns of lines that are filled and released on their own: the latent ones of each half are the V operand of
        one MMA warpgroup. The rotated columns belong to the second."""
        return range(4), range(4, self.columns)

    @property
    def column_bytes(self) -> int:
        return self.spec.cols * LINE

    @property
    def slot_bytes(self) -> int:
        return self.columns * self.column_bytes

    @property
    def half_barrier_bytes(self) -> int:
        """Bytes of the full and empty barriers of one half of all slots."""
        return 2 * self.spec.stages * BARRIER_BYTES
