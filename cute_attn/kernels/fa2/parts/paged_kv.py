"""K and V in pages: token t of a request is row t mod page_size of page kv_indices[first page + t / page_size].

The page of every row of a tile is looked up while the tile before it is worked on, one row a lane, so that it waits in
a register when the row's copies are issued: eight threads take it from the lane that holds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.fa2.parts.kv import KVTiles

ROWS_A_PASS = 4  # of a warp, eight threads each


@dataclass(frozen=True)
class PagedKV(KVTiles):
    """`table`: address of kv_indices, the request's pages from place `first_page` on; strides of `k` and `v` are a
    token's.
    """

    table: Int64
    first_page: Int32
    page_size: Divisor
    k_page_stride: Int64
    v_page_stride: Int64

    def look_up(self, kv_tile: Int32, wanted: Boolean) -> list[Int32]:
        """Pages of a tile: lane 4 i + r has that of row r of this warp's pass i. Tokens past the end are not asked."""
        assert self.passes * ROWS_A_PASS <= 32
        thread = ptx.opaque(self.team.thread)
        lane = thread & 31
        row = (thread >> 5) * ROWS_A_PASS + (lane & 3) + (lane >> 2) * (self.team.size // 8)
        token = self.first_token(kv_tile) + row
        exists = cutlass.and_(token < self.kv_end, cutlass.and_(wanted, lane < self.passes * ROWS_A_PASS))
        place = self.first_page + self.page_size.quotient(token)
        return [ptx.ld_global_u32_if(self.table + Int64(place) * Int64(4), exists)]

    def copies(self, kv_tile: Int32, slot: Int32, wanted: Boolean, pages: list[Int32]) -> Iterator[None]:
        """As `DenseKV.copies`, K and V of a row together."""
        step = self.team.size // 8
        thread = ptx.opaque(self.team.thread)
        row, chunk = thread >> 3, thread & 7
        first = self.first_token(kv_tile)
        end = ptx.select(wanted, self.kv_end - first, Int32(0))
        k_at = self.k_target(slot) + swizzled(row, chunk, self.k.pitch)
        v_at = self.v_target(slot) + swizzled(row, chunk, self.v.pitch)
        scales_at = self.scales_target(slot, row)
        for i in range(self.passes):
            page = ptx.shuffle_from(pages[0], Int32(ROWS_A_PASS * i) + (row & 3))
            token = first + row + i * step
            within = token - self.page_size.quotient(token) * self.page_size.value
            size = ptx.select(Int32(i * step) < end - row, Int32(CHUNK), Int32(0))
            for source, page_stride, target in ((self.k, self.k_page_stride, k_at), (self.v, self.v_page_stride, v_at)):
                address = source.base + Int64(chunk * CHUNK)
                address = ptx.mad_u32(within, source.stride, ptx.mad_u32(page, page_stride, address))
                yield from source.copy_row(target, i * step, address, chunk, size)
            yield from self.scales.copy_row(scales_at, i * step, page, within, size, chunk)
