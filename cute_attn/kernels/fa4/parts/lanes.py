"""Position of a thread that owns a row of a query tile."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import cluster, ptx
from cute_attn.kernels.blocks.sm100 import WARP_LANES
from cute_attn.kernels.fa4.spec import QUERY_TILE_ROWS


@dataclass(frozen=True)
class RowLanes:
    """Position of this thread among those of its warpgroup, which own the rows of a query tile."""

    query_tile: Int32  # of the CTA
    number: Int32  # of the query tile in the work item
    warp: Int32  # within the warpgroup
    lane: Int32

    @classmethod
    def of(cls, query_tile: Int32, ctas: int) -> "RowLanes":
        """Reads the thread index at each call, so that values derived from it need not stay in registers in between.
        Query tiles of the same number in the CTAs of a pair are consecutive in the work item.
        """
        thread = ptx.thread_index()
        number = query_tile if ctas == 1 else query_tile * ctas + cluster.rank()
        return cls(query_tile, number, cute.arch.make_warp_uniform((thread >> 5) & 3), thread & 31)

    @property
    def lane_row(self) -> Int32:
        """Row of the thread within its query tile: its lane of tensor memory."""
        return self.warp * 32 + self.lane

    @property
    def tmem(self) -> Int32:
        """Offset of the warp's lanes in tensor memory."""
        return self.warp * WARP_LANES

    def row(self, slot: int) -> Int32:
        return self.number * QUERY_TILE_ROWS + self.lane_row

    def first_col(self) -> Int32:
        return Int32(0)

    def first_warp_col(self) -> Int32:
        return Int32(0)

    def lane_col(self) -> Int32:
        return Int32(0)
