"""Work tiles: the request, query rows and keys of a CTA, from its position in the grid or a plan in device memory."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks.masks import Band
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.tile_scheduler import load_item, mask_offset
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.schedule.records import Item


@dataclass(frozen=True)
class WorkTile:
    """Work of one CTA: kv tiles [first_tile, last_tile) of a request for the query rows from `first_row`."""

    kv_head: Int32
    first_row: Int32
    qo_start: Int32
    qo_len: Int32
    kv_start: Int32
    kv_len: Int32
    kv_end: Int32  # tokens from here are hidden or belong to another CTA
    right: Int32
    left: Int32
    mask_bits: Int64
    first_tile: Int32
    last_tile: Int32
    partial: Int32

    def band(self, p: Any) -> Band:
        return Band(self.kv_end, self.left, self.right)

    def rows(self, p: Any) -> PackedRows:
        group = p.group.value
        return PackedRows(self.first_row, self.qo_len * group, p.group, self.kv_head * group, self.qo_start)

    def mask(self, p: Any) -> Int64:
        """Address of the first byte of the packed mask."""
        return self.mask_bits


def of_grid(p: Any, tile: Tile) -> WorkTile:
    """Returns the CTA's work on one request: query tiles of all heads along x, splits of the keys along z."""
    x, _, split = cute.arch.block_idx()
    # Heads innermost, last rows first: under a causal mask the longest tiles of all heads start first, and the CTAs
    # of a wave read the same range of their K and V. On an H200 4096 causal tokens gain 16 %, 16384 1 %.
    linear_index = cute.arch.grid_dim()[0] - 1 - x
    index, kv_head = divmod_kv_heads(p, linear_index)
    zero, first = Int32(0), split * p.tiles_per_split
    return WorkTile(
        kv_head=kv_head,
        first_row=index * tile.rows,
        qo_start=zero,
        qo_len=p.qo_len,
        kv_start=zero,
        kv_len=p.kv_len,
        kv_end=p.kv_len,
        right=p.right,
        left=p.left,
        mask_bits=p.mask,
        first_tile=first,
        last_tile=first + p.tiles_per_split,
        partial=split,
    )


def of_items(p: Any, tile: Tile) -> WorkTile:
    """Reads the CTA's work item of a batch, number x / num_kv_heads of the plan; the epilogue reads it again, which is
    cheaper than keeping it in registers. `p.right` and `p.left` are relative to the end of the keys.
    """
    index, kv_head = divmod_kv_heads(p, cute.arch.block_idx()[0])
    item = Item(*map(cute.arch.make_warp_uniform, load_item(p.items, index)))
    position = item.kv_len - item.qo_len  # of query token 0
    return WorkTile(
        kv_head=kv_head,
        first_row=item.first_row,
        qo_start=item.qo_start,
        qo_len=item.qo_len,
        kv_start=item.kv_start,
        kv_len=item.kv_len,
        kv_end=item.kv_end,
        right=position + p.right,
        left=position + p.left,
        mask_bits=p.mask + mask_offset(item.mask_low, item.mask_high),
        first_tile=item.kv_begin // tile.cols,
        last_tile=(item.kv_end + Int32(tile.cols - 1)) // tile.cols,
        partial=item.partial,
    )


def divmod_kv_heads(p: Any, linear_index: Int32) -> tuple[Int32, Int32]:
    """Returns (linear_index / num_kv_heads, kv head): kv heads are innermost."""
    index = p.num_kv_heads.quotient(linear_index)
    return index, linear_index - index * p.num_kv_heads.value
