"""What stores of MMA accumulators share: the four lanes of a quad hold parts of the same rows."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, Target
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.rows import PackedRows


@dataclass(frozen=True)
class FragmentStore:
    """Base of the stores of a warp's or warpgroup's outputs and their lse."""

    layout: MmaFragmentLayout
    lanes: Any  # `TilePosition`, and the lane
    rows: PackedRows
    target: Target | Partials
    epilogue: FinalEpilogue | PartialEpilogue

    @property
    def quad_lane(self) -> Int32:
        return MmaFragmentLayout.quad_lane(self.lanes.lane)

    @property
    def first_col(self) -> Int32:
        """Column of the thread's first register."""
        return self.layout.lane_col(self.lanes.lane)

    @cute.jit
    def store_lse(self, row: Int32, lse: Float32) -> None:
        if cutlass.and_(self.quad_lane == 0, self.rows.exists(row)):
            self.target.store_lse(self.rows, row, lse)

    @cute.jit
    def store_pairs(self, row: Int32, pairs: cutlass.Constexpr) -> None:
        """Stores a row slot as fp32, from an iterable of register pairs, one per block of the layout."""
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.first_col * 4)
            for n, pair in enumerate(pairs):
                ptx.st_global_v2_f32(address, self.layout.column(n) * 4, pair)
