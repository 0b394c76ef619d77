"""K and V tiles loaded by TMA. A box is one line of several tokens of one kv head; maps are [d, token, head, page].

The lanes of the producer warp divide the boxes of a tile between them.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.smem_map import LoadedRows

NO_PAGE = -1  # out of bounds in every map: TMA fills the box with zeros


@dataclass(frozen=True)
class TmaOperand:
    """K or V of TMA: address of the tensor map, whose boxes are one column of several tokens, and the rows' layout."""

    tensor_map: Int64
    rows: LoadedRows


@dataclass(frozen=True)
class DenseTmaKV:
    """Contiguous keys, one box per column; token 0 of the request is row `start`. Rows past the end hold the next
    request's keys, or zeros past the end of the tensor.
    """

    warps: ClassVar[int] = 1
    arrivals: ClassVar[int] = 1  # at a full barrier per tile
    cols: int
    start: Int32
    kv_head: Int32
    lane: Int32
    k: TmaOperand
    v: TmaOperand

    def prefetch_page_ids(self, kv_tile: Int32) -> list[Int32]:
        return []

    @cute.jit
    def copy(
        self, operand: cutlass.Constexpr, target: Int32, barrier: Int32, kv_tile: Int32, page_ids: list[Int32]
    ) -> None:
        if self.lane == 0:
            tma.barrier_expect(barrier, operand.rows.columns * self.cols * operand.rows.pitch)
            for column in cutlass.range_constexpr(operand.rows.columns):
                coordinates = [
                    Int32(column * operand.rows.items),
                    self.start + kv_tile * self.cols,
                    self.kv_head,
                    Int32(0),
                ]
                box = target + Int32(column * self.cols * operand.rows.pitch)
                tma.load_4d(box, operand.tensor_map, coordinates, barrier, tma.EVICT_LAST)

    def commit(self, barriers: list[Int32]) -> None:
        """Nothing to do: TMA counts its own bytes at the barriers."""


@dataclass(frozen=True)
class PagedTmaKV:
    """Paged keys. A box holds as many tokens as are contiguous both in a page and in a tile: their greatest common
    divisor.
    """

    warps: ClassVar[int] = 1
    arrivals: ClassVar[int] = 1  # at a full barrier per tile
    cols: int
    kv_head: Int32
    lane: Int32
    kv_end: Int32
    table: Int64  # address of the request's first page id
    page_size: Divisor
    box_rows: Int32
    k: TmaOperand
    v: TmaOperand

    def rounds(self) -> range:
        return range((self.cols + 31) // 32)

    def prefetch_page_ids(self, kv_tile: Int32) -> list[Int32]:
        """Loads the page ids of this lane's boxes."""
        page_ids = []
        for i in self.rounds():
            row = (self.lane + 32 * i) * self.box_rows
            token = kv_tile * self.cols + row
            exists = cutlass.and_(row < self.cols, token < self.kv_end)
            page = ptx.ld_global_u32_if(self.table + Int64(self.page_size.quotient(token)) * Int64(4), exists)
            page_ids.append(ptx.select(exists, page, Int32(NO_PAGE)))
        return page_ids

    @cute.jit
    def copy(
        self, operand: cutlass.Constexpr, target: Int32, barrier: Int32, kv_tile: Int32, page_ids: list[Int32]
    ) -> None:
        if self.lane == 0:
            tma.barrier_expect(barrier, operand.rows.columns * self.cols * operand.rows.pitch)
        ptx.sync_warp()
        for i in cutlass.range_constexpr(len(page_ids)):
            row = (self.lane + 32 * i) * self.box_rows
            if row < self.cols:
                token = kv_tile * self.cols + row
                within = token - self.page_size.quotient(token) * self.page_size.value
                for column in cutlass.range_constexpr(operand.rows.columns):
                    coordinates = [Int32(column * operand.rows.items), within, self.kv_head, page_ids[i]]
                    box = target + row * operand.rows.pitch + Int32(column * self.cols * operand.rows.pitch)
                    tma.load_4d(box, operand.tensor_map, coordinates, barrier, tma.EVICT_LAST)

    def commit(self, barriers: list[Int32]) -> None:
        """Nothing to do: TMA counts its own bytes at the barriers."""
