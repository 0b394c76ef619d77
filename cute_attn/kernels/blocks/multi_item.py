"""Multi-item scoring: a query token sees a prefix and the keys of its own item up to itself, not those of other items.

The keys between are hidden: tiles of which no row sees a key are left out of the order of kv tiles.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.masks import BandMask, Sees, TileOrder
from cute_attn.kernels.blocks.rows import PackedRows


@dataclass(frozen=True)
class GappedTileOrder(TileOrder):
    """The kv tiles [begin, end) of a CTA without the gap [gap_begin, gap_end), which is empty or before the last tile;
    `full_end` is not past the gap. Tiles before the gap that are not full come after those behind it.
    """

    gap_begin: Int32
    gap_end: Int32

    @property
    def gap(self) -> Int32:
        return self.gap_end - self.gap_begin

    @property
    def masked(self) -> Int32:
        return super().masked - self.gap

    @property
    def total(self) -> Int32:
        return super().total - self.gap

    def at(self, step: Int32) -> Int32:
        right = self.end - self.full_end - self.gap
        from_right = self.end - Int32(1) - step
        from_right = ptx.select(from_right < self.gap_end, from_right - self.gap, from_right)
        masked_tile = ptx.select(step < right, from_right, self.begin + (step - right))
        return ptx.select(step < self.masked, masked_tile, self.full_at(step))


@dataclass(frozen=True)
class KeyBounds:
    """Bounds of the hidden keys of every query token: int32 `[rows of q, 2]`, the end of the prefix and the first key
    of the token's item, which does not decrease within a request. Rows for a whole tile follow the last token's.
    """

    address: Int64
    rows: PackedRows

    def of(self, row: Int32) -> tuple[Int32, Int32]:
        """Loads the bounds of a row."""
        return self.of_token(self.rows.token(row))

    def of_token(self, token: Int32) -> tuple[Int32, Int32]:
        """Loads the bounds of a token of the request; past its last they mean nothing."""
        prefix_end, item_start = ptx.ld_global_v2(self.address + Int64(self.rows.start + token) * Int64(8))
        return prefix_end, item_start

    def order(self, band: TileOrder, cols: int) -> GappedTileOrder:
        """Tiles of `band` of which some row sees a key. The first row sees the most of what is hidden from others."""
        prefix_end, item_start = self.of(Int32(0))
        full_end = ptx.maximum(ptx.minimum(band.full_end, prefix_end // cols), band.begin)
        gap_begin = ptx.minimum(ptx.maximum((prefix_end + Int32(cols - 1)) // cols, band.begin), band.end)
        gap_end = ptx.minimum(ptx.maximum(item_start // cols, gap_begin), band.end)
        # The kernels clear the end of the tile that comes first, which they take for the last one before `end`.
        nothing_behind = gap_end == band.end
        return GappedTileOrder(
            begin=band.begin,
            full_begin=ptx.minimum(band.full_begin, full_end),
            full_end=full_end,
            end=ptx.select(nothing_behind, gap_begin, band.end),
            gap_begin=gap_begin,
            gap_end=ptx.select(nothing_behind, gap_begin, gap_end),
        )


@dataclass(frozen=True)
class MultiItemMask(BandMask):
    """Band without the keys between the prefix and a row's item; all tiles behind the prefix are masked."""

    bounds: KeyBounds

    def tiles(self, tile_rows: int, cols: int, first: Int32, last: Int32) -> TileOrder:
        return self.bounds.order(super().tiles(tile_rows, cols, first, last), cols)

    def seen_by(self, token: Int32, first_col: Int32) -> Sees:
        inside = super().seen_by(token, first_col)
        prefix_end, item_start = (bound - first_col for bound in self.bounds.of_token(token))
        return lambda column: cutlass.and_(inside(column), cutlass.or_(column < prefix_end, column >= item_start))
