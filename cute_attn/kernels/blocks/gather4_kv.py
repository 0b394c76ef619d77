"""K and V rows gathered by TMA, for small pages: tile::gather4 loads a line of any four rows of a map [columns, rows].

The map shows the tensor of all pages as a matrix: its rows are a token's stride apart, pages follow every whole number
of rows, and heads are either columns (NHD) or rows (HND). The lanes of the producer warp divide the groups of rows.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.tma_kv import TmaOperand

GROUP = 4  # rows of an instruction
NO_ROW = -1  # out of bounds in every map: TMA fills the row with zeros


@dataclass(frozen=True)
class Gather4Operand:
    """K or V of one kv head, which has its place in the map of `operand`."""

    operand: TmaOperand
    page_rows: Int32  # of the map, from a page to the next
    first_row: Int32
    first_column: Int32

    @classmethod
    def of(
        cls, operand: TmaOperand, kv_head: Int32, page_rows: Int64, head_rows: Int64, head_columns: Int64
    ) -> "Gather4Operand":
        return cls(operand, Int32(page_rows), kv_head * Int32(head_rows), kv_head * Int32(head_columns))


@dataclass(frozen=True)
class Gather4KV:
    """Paged keys, by row. Rows past the end become zeros."""

    warps: ClassVar[int] = 1
    arrivals: ClassVar[int] = 1  # at a full barrier per tile
    cols: int
    lane: Int32
    kv_end: Int32
    table: Int64  # address of the request's first page id
    page_size: Divisor
    k: Gather4Operand
    v: Gather4Operand
    loads: Any

    @property
    def rounds(self) -> range:
        return range(-(-self.cols // (32 * GROUP)))

    def first_row(self, i: int) -> Int32:
        """First row of this lane's group of round i."""
        return self.lane * GROUP + Int32(32 * GROUP * i)

    def prefetch_page_ids(self, kv_tile: Int32) -> list[Int32]:
        """Loads the page ids of the rows of this lane's groups."""
        page_ids = []
        for i in self.rounds:
            for j in range(GROUP):
                row = self.first_row(i) + Int32(j)
                token = kv_tile * self.cols + row
                exists = cutlass.and_(row < self.cols, token < self.kv_end)
                page = ptx.ld_global_u32_if(self.table + Int64(self.page_size.quotient(token)) * Int64(4), exists)
                page_ids.append(ptx.select(exists, page, Int32(NO_ROW)))
        return page_ids

    @cute.jit
    def copy(
        self, head: cutlass.Constexpr, target: Int32, barrier: Int32, kv_tile: Int32, page_ids: list[Int32]
    ) -> None:
        operand = head.operand
        pitch = operand.rows.pitch
        if self.lane == 0:
            self.loads.expect(barrier, operand.bytes)
        ptx.sync_warp()
        for i in cutlass.range_constexpr(len(self.rounds)):
            row = self.first_row(i)
            slot_row = row - operand.first_key
            if operand.in_part(slot_row, self.cols):
                rows = self.map_rows(head, kv_tile * self.cols + row, page_ids[GROUP * i : GROUP * i + GROUP])
                for column in cutlass.range_constexpr(operand.rows.columns):
                    at = head.first_column + operand.item(column)
                    box = target + slot_row * pitch + Int32(column * operand.keys * pitch)
                    self.loads.gather4(box, operand.tensor_map, at, rows, barrier, tma.EVICT_LAST)

    def map_rows(self, head: Gather4Operand, token: Int32, page_ids: list[Int32]) -> list[Int32]:
        """Returns the rows of the map that hold four tokens."""
        rows = []
        for j, page_id in enumerate(page_ids):
            within = token + Int32(j) - self.page_size.quotient(token + Int32(j)) * self.page_size.value
            row = page_id * head.page_rows + head.first_row + within
            rows.append(ptx.select(page_id < Int32(0), Int32(NO_ROW), row))
        return rows

    def commit(self, barriers: list[Int32]) -> None:
        """Nothing to do: TMA counts its own bytes at the barriers."""
