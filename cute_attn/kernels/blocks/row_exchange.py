"""What warps that hold other columns of the same rows tell each other through shared memory."""

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout, RowNumbers


@dataclass(frozen=True)
class RowExchange:
    """A number per row from each of the warps, and P in 16 bits."""

    memory: Any  # offsets `columns` and `p`, `p_pitch`, its `rows` and `warps_cols`, the number of these warps
    base: Int32  # of shared memory
    lanes: Any  # `FragmentPosition` of the thread, and `warp_col`, the warp's number among them
    layout: MmaFragmentLayout  # of the scores

    @property
    def numbers(self) -> RowNumbers:
        return RowNumbers(self.base + Int32(self.memory.columns), self.memory.rows, self.lanes)

    def put_column(self, values: list[Float32]) -> None:
        """Writes a number per row slot to this warp's column."""
        self.numbers.put(self.lanes.warp_col, values)

    def columns(self, row: Int32) -> list[Float32]:
        """Reads what all warps have put for a row."""
        return self.numbers.of_row(row, self.memory.warps_cols)

    def put_p(self, p: list[Float32], dtype: str) -> None:
        """Writes this thread's part of P."""
        column = self.lanes.first_col()
        for slot in self.layout.slots:
            address = self.base + Int32(self.memory.p) + self.lanes.row(slot) * self.memory.p_pitch + column * 2
            for i, first in self.layout.pairs(slot):
                ptx.st_shared_b32(address, first * 2, ptx.pack_16(dtype, p[i], p[i + 1]))
