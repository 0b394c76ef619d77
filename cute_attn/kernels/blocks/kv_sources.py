"""K and V tiles loaded by TMA. A box is one line of several tokens of one kv head; maps are [d, token, head, page].

The lanes of the producer warp divide the boxes of a tile between them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.smem import CHUNK, present, swizzled
from cute_attn.kernels.blocks.smem_map import LoadedRows
from cute_attn.kernels.formats import LINE

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


@dataclass(frozen=True)
class PageTable:
    """Pages of a request: token t is row t mod `size` of the page whose id is entry t / `size` of its table."""

    entries: Int64  # address of the first page id
    size: Divisor
    kv_end: Int32

    def page_ids(self, tokens: Iterable[tuple[Boolean, Int32]]) -> list[Int32]:
        """Loads the page ids of tokens of the request that are wanted, as `ptx.ld_page_id_if`."""
        exist = ((cutlass.and_(wanted, token < self.kv_end), token) for wanted, token in tokens)
        return [
            ptx.ld_page_id_if(exists, self.entries + Int64(self.size.quotient(token)) * Int64(4))
            for exists, token in exist
        ]

    def within(self, token: Int32) -> Int32:
        """Returns the row of a token in its page."""
        return token - self.size.quotient(token) * self.size.value

    def address(self, rows: Any, token: Int32, page: Int32) -> Int64:
        """Returns the address of a token's row; `rows` have a base and strides, per token and per page."""
        return ptx.mad_u32(self.within(token), rows.stride, ptx.mad_u32(page, rows.page_stride, rows.base))


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
class TmaKV(KvSource):
    """Keys loaded in boxes."""

    cols: int
    kv_head: Int32
    lane: Int32
    k: TmaOperand
    v: TmaOperand
    cta: Any  # `OneCta`


@dataclass(frozen=True)
class DenseTmaKV(TmaKV):
    """Contiguous keys, one box per column; token 0 of the request is row `start`. Rows past the end hold the next
    request's keys, or zeros past the end of the tensor.
    """

    start: Int32

    @cute.jit
    def copy(
        self, operand: cutlass.Constexpr, target: Int32, barrier: Int32, kv_tile: Int32, page_ids: list[Int32]
    ) -> None:
        if self.lane == 0:
            self.cta.expect(barrier, operand.bytes)
            for column in cutlass.range_constexpr(operand.rows.columns):
                token = self.start + kv_tile * self.cols + operand.first_key
                coordinates = [operand.item(column), token, self.kv_head, Int32(0)]
                box = target + Int32(column * operand.keys * operand.rows.pitch)
                self.cta.load_4d(box, operand.tensor_map, coordinates, barrier, tma.EVICT_LAST)


@dataclass(frozen=True)
class PagedTmaKV(TmaKV):
    """Paged keys. A box holds as many tokens as are contiguous both in a page and in a tile: their greatest common
    divisor.
    """

    pages: PageTable
    box_rows: Int32

    def prefetch_page_ids(self, kv_tile: Int32) -> list[Int32]:
        """Loads the page ids of this lane's boxes."""
        page_ids = []
        for i in range((self.cols + 31) // 32):
            row = (self.lane + 32 * i) * self.box_rows
            token = kv_tile * self.cols + row
            exists = cutlass.and_(row < self.cols, token < self.pages.kv_end)
            page = ptx.load_word_if(exists, self.pages.entries + Int64(self.pages.size.quotient(token)) * Int64(4))
            page_ids.append(ptx.select(exists, page, Int32(NO_PAGE)))
        return page_ids

    @cute.jit
    def copy(
        self, operand: cutlass.Constexpr, target: Int32, barrier: Int32, kv_tile: Int32, page_ids: list[Int32]
    ) -> None:
        if self.lane == 0:
            self.cta.expect(barrier, operand.bytes)
        ptx.sync_warp()
        for i in cutlass.range_constexpr(len(page_ids)):
            row = (self.lane + 32 * i) * self.box_rows
            slot_row = row - operand.first_key
            if operand.in_part(slot_row, self.cols):
                within = self.pages.within(kv_tile * self.cols + row)
                for column in cutlass.range_constexpr(operand.rows.columns):
                    coordinates = [operand.item(column), within, self.kv_head, page_ids[i]]
                    box = target + slot_row * operand.rows.pitch + Int32(column * operand.keys * operand.rows.pitch)
                    self.cta.load_4d(box, operand.tensor_map, coordinates, barrier, tma.EVICT_LAST)


# --- gathered rows ----------------------------------------------------------------------------------------------------

# For pages too small for TMA boxes. cp.async writes the layout that TMA would: 128-byte lines of all rows, one column
# of 64 elements after the other, swizzled. It writes through the generic proxy, and wgmma and tcgen05 read through the
# async proxy, so every thread waits for its own copies and fences them before its warp arrives at the full barrier.


ROWS_PER_PASS = 4  # of a warp, eight threads per row


@dataclass(frozen=True)
class PageRows:
    """K or V of one kv head: address of row 0 of page 0, strides in bytes, 16-byte chunks per row."""

    base: Int64
    page_stride: Int64
    stride: Int64
    chunks: int


@dataclass(frozen=True)
class GatheredKV(KvSource):
    """Rows gathered by a warpgroup of producers: a part of the tile per warp, in rounds of one row per lane, whose page
    ids the lanes hold. Rows past the end become zeros.
    """

    warps: ClassVar[int] = 4
    arrivals: ClassVar[int] = 4  # at a full barrier per tile: one per warp
    cols: int
    thread: Int32  # of the producer warps
    pages: PageTable
    k: PageRows
    v: PageRows

    @property
    def warp_rows(self) -> int:
        return self.cols // self.warps

    @property
    def rounds(self) -> range:
        return range(-(-self.warp_rows // 32))

    @property
    def round_rows(self) -> int:
        return self.warp_rows // len(self.rounds)

    def prefetch_page_ids(self, kv_tile: Int32) -> list[Int32]:
        """Loads the page ids of this lane's rows."""
        assert self.round_rows in range(ROWS_PER_PASS, 33, ROWS_PER_PASS)
        return self.pages.page_ids((self.thread & 31 < self.round_rows, self.token(kv_tile, i)) for i in self.rounds)

    def token(self, kv_tile: Int32, i: int) -> Int32:
        """Token of this lane's row of round i."""
        first = kv_tile * self.cols + (self.thread >> 5) * self.warp_rows + (self.thread & 31)
        return first + Int32(i * self.round_rows) if i else first

    def copy(self, rows: PageRows, target: Int32, barrier: Int32, kv_tile: Int32, page_ids: list[Int32]) -> None:
        """Issues the copies of a tile; `commit` must follow."""
        for i in self.rounds:
            self.copy_round(rows, target, kv_tile, i, page_ids[i])
        ptx.cp_async_commit()

    def copy_round(self, rows: PageRows, target: Int32, kv_tile: Int32, i: int, page_id: Int32) -> None:
        token, lane = self.token(kv_tile, i), self.thread & 31
        address = self.pages.address(rows, token, page_id)
        row, chunk = lane >> 3, lane & 7  # in a pass
        left = self.pages.kv_end - (token - lane + row)
        shared = target + swizzled((self.thread >> 5) * self.warp_rows + row, chunk, LINE)
        for j in range(self.round_rows // ROWS_PER_PASS):
            first = i * self.round_rows + j * ROWS_PER_PASS
            source = ptx.shuffle_from(address, row + Int32(ROWS_PER_PASS * j)) + Int64(chunk * CHUNK)
            size = ptx.select(left > Int32(ROWS_PER_PASS * j), Int32(CHUNK), Int32(0))
            destination = shared ^ Int32(ROWS_PER_PASS * CHUNK) if first // ROWS_PER_PASS % 2 else shared
            for line in range(-(-rows.chunks // 8)):
                part = present(chunk, rows.chunks - line * 8, 8, size)
                offset = line * self.cols * LINE + first * LINE
                ptx.cp_async(destination, offset, source, line * LINE, part)

    @cute.jit
    def commit(self, barriers: list[Int32]) -> None:
        """Waits for the issued copies, fences them and arrives at the full barriers of their tiles."""
        ptx.cp_async_wait(0)
        tma.fence_async()
        ptx.sync_warp()
        if self.thread & 31 == 0:
            for i in cutlass.range_constexpr(len(barriers)):
                tma.barrier_arrive(barriers[i])


class TwoWarpGatheredKV(GatheredKV):
    """Rows gathered by two producer warps."""

    warps: ClassVar[int] = 2
    arrivals: ClassVar[int] = 2


@dataclass(frozen=True)
class GatheredFp8KV(KvSource):
    """Rows of 8-bit elements gathered by the producer warp alone for the transform warps: contiguous, not swizzled.
    Four lanes copy 64 bytes of a row; each lane holds the page ids of `cols` / 32 rows. Rows past the end become zeros.

    Only the readers wait for the copies, at the barrier; they read through the generic proxy, so no fence is needed.
    """

    arrivals: ClassVar[int] = 32  # at a full barrier per tile: every lane's own copies
    cols: int
    lane: Int32
    pages: PageTable
    k: PageRows
    v: PageRows

    @property
    def rounds(self) -> range:
        return range(-(-self.cols // 32))

    def prefetch_page_ids(self, kv_tile: Int32) -> list[Int32]:
        rows = (self.lane + 32 * i for i in self.rounds)
        return self.pages.page_ids((row < self.cols, kv_tile * self.cols + row) for row in rows)

    def copy(self, rows: PageRows, target: Int32, barrier: Int32, kv_tile: Int32, page_ids: list[Int32]) -> None:
        columns = -(-rows.chunks // 4)
        row, chunk = self.lane >> 2, self.lane & 3  # within a pass of eight rows
        shared = target + row * (64 * columns) + chunk * CHUNK
        left = self.pages.kv_end - (kv_tile * self.cols + row)
        for i in self.rounds:
            address = self.pages.address(rows, kv_tile * self.cols + self.lane + 32 * i, page_ids[i])
            for first in range(32 * i, min(32 * i + 32, self.cols), 8):
                source = ptx.shuffle_from(address, row + Int32(first % 32)) + Int64(chunk * CHUNK)
                size = ptx.select(left > Int32(first), Int32(CHUNK), Int32(0))
                for column in range(columns):
                    part = present(chunk, rows.chunks - 4 * column, 4, size)
                    ptx.cp_async(shared, (first * columns + column) * 64, source, column * 64, part)
        ptx.cp_async_arrive(barrier)
