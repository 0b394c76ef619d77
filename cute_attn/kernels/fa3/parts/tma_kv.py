"""K and V tiles out of TMA boxes: a line of some tokens of one kv head; maps are [d, token, head, page].

The boxes of a tile are shared out among the lanes of the producer warp.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.rows import Divisor

NO_PAGE = -1  # no page of any map: TMA fills its boxes with zeros


@dataclass(frozen=True)
class Boxes:
    """K or V: the address of its tensor map, and the columns of a row: lines of so many elements, bytes apart."""

    tensor_map: Int64
    columns: int
    line_items: int
    pitch: int


@dataclass(frozen=True)
class DenseBoxes:
    """One box of all columns: token 0 of the request is row `start`. Rows past the end are the next request's, or zeros
    past the end of the tensor.
    """

    cols: int
    start: Int32
    kv_head: Int32
    lane: Int32
    k: Boxes
    v: Boxes

    def look_up(self, kv_tile: Int32) -> list[Int32]:
        return []

    @cute.jit
    def copy(self, boxes: cutlass.Constexpr, target: Int32, barrier: Int32, kv_tile: Int32, pages: list[Int32]) -> None:
        if self.lane == 0:
            sm90.barrier_expect(barrier, boxes.columns * self.cols * boxes.pitch)
            for column in cutlass.range_constexpr(boxes.columns):
                place = [Int32(column * boxes.line_items), self.start + kv_tile * self.cols, self.kv_head, Int32(0)]
                box = target + Int32(column * self.cols * boxes.pitch)
                sm90.tma_load_4d(box, boxes.tensor_map, place, barrier, sm90.EVICT_LAST)

    def landed(self, barriers: list[Int32]) -> None:
        """TMA itself counts its bytes at the barriers."""


@dataclass(frozen=True)
class PagedBoxes:
    """Boxes of as many tokens as lie together both in a page and in a tile: the greatest common divisor of the two."""

    cols: int
    kv_head: Int32
    lane: Int32
    kv_end: Int32
    table: Int64  # address of the request's first page number
    page_size: Divisor
    box_rows: Int32
    k: Boxes
    v: Boxes

    def rounds(self) -> range:
        return range((self.cols + 31) // 32)

    def look_up(self, kv_tile: Int32) -> list[Int32]:
        """The pages of this lane's boxes."""
        pages = []
        for i in self.rounds():
            row = (self.lane + 32 * i) * self.box_rows
            token = kv_tile * self.cols + row
            exists = cutlass.and_(row < self.cols, token < self.kv_end)
            page = ptx.ld_global_u32_if(self.table + Int64(self.page_size.quotient(token)) * Int64(4), exists)
            pages.append(ptx.select(exists, page, Int32(NO_PAGE)))
        return pages

    @cute.jit
    def copy(self, boxes: cutlass.Constexpr, target: Int32, barrier: Int32, kv_tile: Int32, pages: list[Int32]) -> None:
        if self.lane == 0:
            sm90.barrier_expect(barrier, boxes.columns * self.cols * boxes.pitch)
        ptx.sync_warp()
        for i in cutlass.range_constexpr(len(pages)):
            row = (self.lane + 32 * i) * self.box_rows
            if row < self.cols:
                token = kv_tile * self.cols + row
                within = token - self.page_size.quotient(token) * self.page_size.value
                for column in cutlass.range_constexpr(boxes.columns):
                    place = [Int32(column * boxes.line_items), within, self.kv_head, pages[i]]
                    box = target + row * boxes.pitch + Int32(column * self.cols * boxes.pitch)
                    sm90.tma_load_4d(box, boxes.tensor_map, place, barrier, sm90.EVICT_LAST)

    def landed(self, barriers: list[Int32]) -> None:
        """TMA itself counts its bytes at the barriers."""
