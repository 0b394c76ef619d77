"""K and V in pages: token t of a request is row t mod page_size of page kv_indices[first page + t / page_size].

Page ids of a tile, one row per lane, are loaded while the previous tile is computed, so that they are in registers when
the copies are issued: the eight threads of a row shuffle its page id from the lane that holds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.fa2.parts.kv import KVTiles

ROWS_PER_PASS = 4  # of a warp, eight threads per row


@dataclass(frozen=True)
class PagedKV(KVTiles):
    """Paged K and V. `table`: address of kv_indices, where the request's pages start at index `first_page`; strides of
    `k` and `v` are per token.
    """

    table: Int64
    first_page: Int32
    page_size: Divisor
    k_page_stride: Int64
    v_page_stride: Int64

    def prefetch_page_ids(self, kv_tile: Int32, wanted: Boolean) -> list[Int32]:
        """Loads the page ids of a tile: lane 4 i + r holds that of row r of this warp's pass i. Nothing is read past
        the end.
        """
        assert self.passes * ROWS_PER_PASS <= 32
        thread = ptx.opaque(self.team.thread)
        lane = thread & 31
        row = (thread >> 5) * ROWS_PER_PASS + (lane & 3) + (lane >> 2) * (self.team.size // 8)
        token = self.first_token(kv_tile) + row
        exists = cutlass.and_(token < self.kv_end, cutlass.and_(wanted, lane < self.passes * ROWS_PER_PASS))
        page_index = self.first_page + self.page_size.quotient(token)
        return [ptx.ld_page_id_if(self.table + Int64(page_index) * Int64(4), exists)]

    def copies(self, kv_tile: Int32, slot: Int32, wanted: Boolean, page_ids: list[Int32]) -> Iterator[None]:
        """Copies as `DenseKV.copies`, with K and V of a row together."""
        step = self.team.size // 8
        thread = ptx.opaque(self.team.thread)
        row, chunk = thread >> 3, thread & 7
        first = self.first_token(kv_tile)
        end = ptx.select(wanted, self.kv_end - first, Int32(0))
        k_at = self.k_target(slot) + swizzled(row, chunk, self.k.pitch)
        v_at = self.v_target(slot) + swizzled(row, chunk, self.v.pitch)
        scales_at = self.scales_target(slot, row)
        for i in range(self.passes):
            page = ptx.shuffle_from(page_ids[0], Int32(ROWS_PER_PASS * i) + (row & 3))
            token = first + row + i * step
            within = token - self.page_size.quotient(token) * self.page_size.value
            size = ptx.select(Int32(i * step) < end - row, Int32(CHUNK), Int32(0))
            for source, page_stride, target in ((self.k, self.k_page_stride, k_at), (self.v, self.v_page_stride, v_at)):
                address = source.base + Int64(chunk * CHUNK)
                address = ptx.mad_u32(within, source.stride, ptx.mad_u32(page, page_stride, address))
                yield from source.copy_row(target, i * step, address, chunk, size)
            yield from self.scales.copy_row(scales_at, i * step, page, within, size, chunk)
