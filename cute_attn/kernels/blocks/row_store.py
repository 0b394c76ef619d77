"""Store of threads that own whole rows: no exchange between lanes."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, RowStats, Target
from cute_attn.kernels.blocks.register_layout import RowLayout, TilePosition
from cute_attn.kernels.blocks.rows import PackedRows


@dataclass(frozen=True)
class RowStore:
    """Store of rows, some columns at a time as tensor memory gives them, and of their lse."""

    layout: RowLayout
    lanes: TilePosition
    rows: PackedRows
    target: Target | Partials
    epilogue: FinalEpilogue | PartialEpilogue

    @cute.jit
    def write_lse(self, shift: list[Float32], total: list[Float32]) -> Float32:
        """Stores the lse of the thread's row, from what softmax leaves; returns the factor for the row's output."""
        row, stats = self.lanes.row(0), RowStats.of(self.layout, shift, total)
        factor, lse = self.epilogue.row(stats.maximum[0], stats.total[0], self.rows.head(row))
        if self.rows.exists(row):
            self.target.store_lse(self.rows, row, lse)
        return factor

    @cute.jit
    def write_columns(self, first: cutlass.Constexpr, values: list[Float32], factor: Float32) -> None:
        """Stores the layout's columns, or fewer, to the output's columns from `first`; all multiples of eight.

        Rows of `out` need not start at multiples of 32 bytes, where the hardware would take 32 bytes at a time.
        """
        row, values, target = self.lanes.row(0), [x * factor for x in values], self.target
        if self.rows.exists(row):
            size, aligned = target.element_bytes, target.aligned_to_32
            address, at_once = target.row(self.rows, row) + Int64(first * size), 32 // size
            for i in cutlass.range_constexpr(0, len(values), at_once):
                part = values[i : i + at_once]
                if cutlass.const_expr(len(part) == at_once):
                    target.store_32_bytes(address, i * size, part, aligned)
                else:
                    target.store_8(address, i * size, part)
