"""K and V tiles loaded by TMA. A box is one line of several tokens of one kv head; maps are [d, token, head, page].

The lanes of the producer warp divide the boxes of a tile between them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.smem_map import LoadedRows

NO_PAGE = -1  # out of bounds in every map: TMA fills the box with zeros


@dataclass(frozen=True)
class TmaOperand:
    """K or V of TMA: address of the tensor map, whose boxes are one column of several tokens, the rows' layout, and the
    part of a kv tile that is loaded: `keys` keys from `first_key`, the columns from `first_column`.
    """

    tensor_map: Int64
    rows: LoadedRows
    keys: int
    first_key: Int32 | int = 0
    first_column: Int32 | int = 0

    @property
    def bytes(self) -> int:
        return self.rows.columns * self.keys * self.rows.pitch

    def item(self, column: int) -> Int32:
        """Returns the first element of a loaded column."""
        return (self.first_column + Int32(column)) * self.rows.items

    def in_part(self, slot_row: Int32, cols: int) -> Boolean:
        """Whether a row of the slot, for a tile of `cols` keys, belongs to the loaded part."""
        if self.keys == cols:
            return slot_row < cols
        return cutlass.and_(slot_row >= 0, slot_row < self.keys)


class KvSource:
    """How K and V tiles are loaded: by the producer warp alone, whose copies arrive at full barriers by themselves."""

    warps: ClassVar[int] = 1
    arrivals: ClassVar[int] = 1  # at a full barrier per tile

    def prefetch_page_ids(self, kv_tile: Int32) -> list[Int32]:
        """Loads the page ids of what this lane copies of a tile."""
        return []

    def commit(self, barriers: list[Int32]) -> None:
        """Completes issued copies, and arrives at the full barriers of their tiles."""


@dataclass(frozen=True)
class DenseTmaKV(KvSource):
    """Contiguous keys, one box per column; token 0 of the request is row `start`. Rows past the end hold the next
    request's keys, or zeros past the end of the tensor.
    """

    cols: int
    start: Int32
    kv_head: Int32
    lane: Int32
    k: TmaOperand
    v: TmaOperand
    loads: Any

    @cute.jit
    def copy(
        self, operand: cutlass.Constexpr, target: Int32, barrier: Int32, kv_tile: Int32, page_ids: list[Int32]
    ) -> None:
        if self.lane == 0:
            self.loads.expect(barrier, operand.bytes)
            for column in cutlass.range_constexpr(operand.rows.columns):
                token = self.start + kv_tile * self.cols + operand.first_key
                coordinates = [operand.item(column), token, self.kv_head, Int32(0)]
                box = target + Int32(column * operand.keys * operand.rows.pitch)
                self.loads.load_4d(box, operand.tensor_map, coordinates, barrier, tma.EVICT_LAST)


@dataclass(frozen=True)
class PagedTmaKV(KvSource):
    """Paged keys. A box holds as many tokens as are contiguous both in a page and in a tile: their greatest common
    divisor.
    """

    cols: int
    kv_head: Int32
    lane: Int32
    kv_end: Int32
    table: Int64  # address of the request's first page id
    page_size: Divisor
    box_rows: Int32
    k: TmaOperand
    v: TmaOperand
    loads: Any

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
            self.loads.expect(barrier, operand.bytes)
        ptx.sync_warp()
        for i in cutlass.range_constexpr(len(page_ids)):
            row = (self.lane + 32 * i) * self.box_rows
            slot_row = row - operand.first_key
            if operand.in_part(slot_row, self.cols):
                token = kv_tile * self.cols + row
                within = token - self.page_size.quotient(token) * self.page_size.value
                for column in cutlass.range_constexpr(operand.rows.columns):
                    coordinates = [operand.item(column), within, self.kv_head, page_ids[i]]
                    box = target + slot_row * operand.rows.pitch + Int32(column * operand.keys * operand.rows.pitch)
                    self.loads.load_4d(box, operand.tensor_map, coordinates, barrier, tma.EVICT_LAST)
