"""Shared-memory map of the kernel for latent attention on wgmma. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import BARRIER_BYTES
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.mla.spec import HopperMlaSpec

HALVES = 2  # of a tile
ROTATED = 8  # the column of lines with rotated numbers
RECORD_BYTES = 48  # of a segment, as the producers leave it for the MMA warpgroups


@dataclass(frozen=True)
class HopperMlaMemory:
    """Two slots of a tile each, the query rows, P, and numbers per row.

    Tiles, query rows and P have columns of lines, one after the other: 128 bytes of all rows, swizzled.
    """

    spec: HopperMlaSpec

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
    def q(self) -> int:
        return self.spec.stages * self.slot_bytes

    @property
    def p(self) -> int:
        return self.q + self.columns * self.spec.rows * LINE

    @property
    def shifts(self) -> int:
        """Offset of a negated anchor per row from each MMA warpgroup."""
        return self.p + self.spec.rows * LINE

    @property
    def totals(self) -> int:
        """Offset of a sum per row from each MMA warpgroup."""
        return self.shifts + 2 * self.spec.rows * 4

    @property
    def barriers(self) -> int:
        """Offset of the full and empty barriers of Q, and of both halves of each slot."""
        return self.totals + 2 * self.spec.rows * 4

    @property
    def half_barrier_bytes(self) -> int:
        """Bytes of the full and empty barriers of one half of all slots."""
        return 2 * self.spec.stages * BARRIER_BYTES

    @property
    def records(self) -> int:
        """Offset of two records of segments, used in turn."""
        return self.barriers + 2 * BARRIER_BYTES + HALVES * self.half_barrier_bytes

    @property
    def ticket(self) -> int:
        """Offset of one word: the number of CTAs that had stored their states before this one."""
        return self.records + 2 * RECORD_BYTES

    @property
    def bytes(self) -> int:
        return self.ticket + 16
