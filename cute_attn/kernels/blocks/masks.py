"""Masks: which kv columns a row sees, and which kv tiles need a mask.

Masked tiles come first: the order does not matter to softmax, and the loop over fully visible tiles then needs no mask
code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import FragmentPosition, RegisterLayout
from cute_attn.kernels.blocks.rows import PackedRows

Sees = Callable[[Int32], Boolean]  # whether a column, relative to a thread's first, is visible


@dataclass(frozen=True)
class TileOrder:
    """The kv tiles [begin, end) of a CTA; every row sees all of [full_begin, full_end)."""

    begin: Int32
    full_begin: Int32
    full_end: Int32
    end: Int32

    @property
    def masked(self) -> Int32:
        return (self.end - self.full_end) + (self.full_begin - self.begin)

    @property
    def total(self) -> Int32:
        return self.end - self.begin

    def at(self, step: Int32) -> Int32:
        """Tile of a step: from the right edge downwards, from the left edge upwards, then full tiles downwards."""
        right = self.end - self.full_end
        masked_tile = ptx.select(step < right, self.end - Int32(1) - step, self.begin + (step - right))
        return ptx.select(step < self.masked, masked_tile, self.full_at(step))

    def full_at(self, step: Int32) -> Int32:
        """Tile of a step known to be past the masked ones: one subtraction from a constant of the CTA."""
        return (self.full_end + (self.masked - Int32(1))) - step

    def skipped(self, band: "Band", rows: PackedRows, row: Int32, count: int, cols: int) -> Int32:
        """Number of tiles at the start of the order of which the `count` rows from `row` see nothing: the right edge is
        first, and the last of them sees most. All, where there are no such rows.
        """
        end = (ptx.maximum(band.stop(rows.last_token(count, row)), Int32(0)) + Int32(cols - 1)) // cols
        beyond = ptx.minimum(ptx.maximum(self.end - end, Int32(0)), self.end - self.full_end)
        return ptx.select(cutlass.or_(end <= self.begin, rows.exists(row) == Boolean(False)), self.total, beyond)

    def with_full(self, bits: Int32) -> "TileOrder":
        """The same tiles if `bits` is -1. If it is 0, all of them count as masked, so that their order is from the last
        to the first: a row's sums are then rounded in one order whatever rows share its tile.
        """
        full_begin = self.begin + ((self.full_begin - self.begin) & bits)  # ptxas spills where these are selected
        full_end = self.begin + ((self.full_end - self.begin) & bits)
        return TileOrder(self.begin, full_begin, full_end, self.end)


@dataclass(frozen=True)
class Band:
    """Band of visible keys: the row of token i sees kv j with max(0, i + left) <= j < min(kv_end, i + right + 1)."""

    kv_end: Int32
    left: Int32
    right: Int32

    def stop(self, token: Int32) -> Int32:
        return ptx.minimum(self.kv_end, token + self.right + Int32(1))

    def tiles(self, rows: PackedRows, tile_rows: int, cols: int, first: Int32, last: Int32) -> TileOrder:
        """Tiles of `cols` columns that the rows need, within [first, last)."""
        zero = Int32(0)
        low, high = rows.token(zero), rows.last_token(tile_rows)
        begin = ptx.maximum(first, ptx.maximum(zero, low + self.left) // cols)
        end = ptx.minimum(last, (ptx.maximum(zero, self.stop(high)) + Int32(cols - 1)) // cols)
        end = ptx.maximum(begin, end)
        full_end = ptx.maximum(zero, self.stop(low)) // cols
        full_end = ptx.maximum(ptx.minimum(full_end, end), begin)
        full_begin = (ptx.maximum(zero, high + self.left) + Int32(cols - 1)) // cols
        full_begin = ptx.minimum(ptx.maximum(full_begin, begin), full_end)
        return TileOrder(begin, full_begin, full_end, end)


@dataclass(frozen=True)
class BandMask:
    """Causal, sliding window and length bounds: two comparisons per score, on edge tiles only."""

    band: Band
    layout: RegisterLayout
    rows: PackedRows
    lanes: FragmentPosition

    def tiles(self, tile_rows: int, cols: int, first: Int32, last: Int32) -> TileOrder:
        return self.band.tiles(self.rows, tile_rows, cols, first, last)

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        """Sets the scores of hidden columns to -inf."""
        out = list(s)
        first_col = kv_start + self.lanes.first_col()
        for slot in self.layout.slots:
            sees = self.seen_by(self.rows.token(self.lanes.row(slot)), first_col)
            for register, column in self.layout.places(slot):
                out[register] = ptx.select(sees(Int32(column)), out[register], Float32(ptx.NEG_INF))
        return out

    def seen_by(self, token: Int32, first_col: Int32) -> Sees:
        """Returns whether a token sees a column. Relative to this thread's first column, the columns are constants;
        only the limits vary.
        """
        stop, start = self.band.stop(token) - first_col, token + self.band.left - first_col
        return lambda column: cutlass.and_(column < stop, column >= start)


class StopMask(BandMask):
    """Mask of a band without left bound: one comparison per score."""

    def seen_by(self, token: Int32, first_col: Int32) -> Sees:
        stop = self.band.stop(token) - first_col
        return lambda column: column < stop


@dataclass(frozen=True)
class PackedMask(BandMask):
    """Custom mask within the band: one bit per (token, kv) pair in little bit order, rows not padded."""

    bits: Int64
    bits_end: Int64
    kv_len: Int32

    def tiles(self, tile_rows: int, cols: int, first: Int32, last: Int32) -> TileOrder:
        return self.all_masked(super().tiles(tile_rows, cols, first, last))

    @staticmethod
    def all_masked(order: TileOrder) -> TileOrder:
        return TileOrder(order.begin, order.begin, order.begin, order.end)

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        out = list(super().apply(s, kv_start))
        warp_col = kv_start + self.lanes.first_warp_col()
        for slot in self.layout.slots:
            token = self.rows.token(self.lanes.row(slot))
            words = self.row_words(token, warp_col)
            for register, column in self.layout.places(slot):
                bit = words[column // 32] & Int32(1 << column % 32 if column % 32 < 31 else -(1 << 31))
                out[register] = ptx.select(bit != Int32(0), out[register], Float32(ptx.NEG_INF))
        return out

    def row_words(self, token: Int32, col: Int32) -> list[Int32]:
        """Loads the mask bits of the warp's columns as 32-bit words, shifted so that this thread's first column is bit
        0.

        Words start at the warp's first column, not at the thread's: both bits of an MMA pair then lie in one word.
        """
        raw, shift = mask_words(self, token, col, self.layout.places(0)[-1][1] // 32 + 2)
        inner = self.lanes.lane_col()
        words = [funnel_shift_right(low, high, shift) for low, high in pairwise(raw)]
        return [word >> inner for word in words]


def mask_words(mask: Any, token: Int32, col: Int32, count: int) -> tuple[list[Int32], Int32]:
    """Loads `count` words with the bits of a token's columns from `col`, and returns the bit where these begin. `mask`:
    its `bits`, their end and `kv_len`.
    """
    bit = Int64(token) * Int64(mask.kv_len) + Int64(col)
    address = mask.bits + (bit >> Int64(3))
    aligned = address & Int64(-4)
    shift = Int32((address & Int64(3)) * Int64(8) + (bit & Int64(7)))
    return [load_mask_word(aligned + Int64(4 * i), mask.bits_end) for i in range(count)], shift


@cute.jit
def load_mask_word(address: Int64, end: Int64) -> Int32:
    """Loads four mask bytes; those past the end of the buffer are not accessed and read as zero."""
    word = Int32(0)
    if address + 4 <= end:
        word = ptx.ld_global_u32(address)
    else:
        for i in cutlass.range_constexpr(3):
            if address + i < end:
                word = word | (ptx.ld_global_u8(address + i) << (8 * i))
    return word


funnel_shift_right = ptx.arithmetic("shf.r.wrap.b32", Int32)  # the low 32 bits of (high:low) >> shift, from 0 to 31


# Words of 32 columns, bit i set where a mask hides column i. A word costs a few instructions per chunk of columns, and
# ptxas turns tests of its bits for zero into predicates, seven or eight with one R2P.
COLUMNS = 32  # of a word


def columns_before(stop: Int32) -> Int32:
    """Returns the word of the columns below `stop`."""
    return ~columns_from(stop)


def columns_from(start: Int32) -> Int32:
    """Returns the word of the columns from `start`. The shift clamps: nothing is left of 32 and more."""
    return ptx.asm("shl.b32 $0, -1, $1;", [Int32], [ptx.maximum(start, Int32(0))], pure=True)


def hide(s: list[Float32], hidden: Int32, value: Float32) -> list[Float32]:
    """Sets the scores of hidden columns to `value`."""
    word = ptx.opaque(hidden)  # hoisted out of a loop, each test would take an instruction of its own
    bits = [word & Int32(1 << i if i < 31 else -(1 << 31)) for i in range(len(s))]
    return [ptx.select(bit == Int32(0), x, value) for x, bit in zip(s, bits, strict=True)]


# --- ranges of keys ---------------------------------------------------------------------------------------------------


NO_KEY = (1 << 31) - 1  # where an empty interval starts
WARP = 32


@dataclass(frozen=True)
class Interval:
    """Keys [start, stop); an empty one has `start` >= `stop`."""

    start: Int32
    stop: Int32

    @property
    def empty(self) -> cutlass.Boolean:
        return self.start >= self.stop

    def sees(self, col: Int32) -> cutlass.Boolean:
        return cutlass.and_(col >= self.start, col < self.stop)


@dataclass(frozen=True)
class RangeMask(BandMask):
    """Band, and the keys of each token's range: int32 `[rows of q, 2]`, the first and the last key, (-1, -1) for none.

    A range need not contain its token, nor touch the token's part of the band. `left`: the first key of a range that a
    token at position p sees is not before p + left.
    """

    ranges: Int64
    left: Int32
    last_token: Int32

    def band_of(self, token: Int32) -> Interval:
        return Interval(ptx.maximum(Int32(0), token + self.band.left), self.band.stop(token))

    def range_of(self, token: Int32) -> Interval:
        first, last = ptx.ld_global_v2(self.ranges + Int64(self.rows.start + token) * Int64(8))
        position = token + self.band.right
        start = ptx.maximum(ptx.maximum(first, position + self.left), Int32(0))
        return Interval(start, ptx.minimum(last, self.band.kv_end - Int32(1)) + Int32(1))

    def tiles(self, tile_rows: int, cols: int, first: Int32, last: Int32) -> TileOrder:
        """Tiles from the first to the last key that a row sees. Those are full that lie in one interval of each row.

        The lanes of a warp share the tokens, so that all of them must be here.
        """
        begin, end, full_begin, full_end = Int32(NO_KEY), Int32(0), Int32(0), Int32(NO_KEY)
        low, lane = self.rows.token(Int32(0)), cute.arch.lane_idx()
        for i in range((tile_rows + WARP - 1) // WARP):
            token = ptx.minimum(low + lane + Int32(WARP * i), self.last_token)
            band, own = self.band_of(token), self.range_of(token)
            begin = ptx.minimum(begin, ptx.minimum(self._start(band), self._start(own)))
            end = ptx.maximum(end, ptx.maximum(band.stop, own.stop))
            whole = self._whole(band, own)
            full_begin, full_end = ptx.maximum(full_begin, whole.start), ptx.minimum(full_end, whole.stop)
        begin, full_end = ptx.warp_minimum(begin), ptx.warp_minimum(full_end)
        end, full_begin = ptx.warp_maximum(end), ptx.warp_maximum(full_begin)

        begin = ptx.minimum(last, ptx.maximum(first, begin // cols))
        end = ptx.maximum(begin, ptx.minimum(last, (end + Int32(cols - 1)) // cols))
        full_end = ptx.maximum(begin, ptx.minimum(end, ptx.maximum(full_end, Int32(0)) // cols))
        full_begin = ptx.minimum(ptx.maximum(begin, (full_begin + Int32(cols - 1)) // cols), full_end)
        return TileOrder(begin, full_begin, full_end, end)

    @staticmethod
    def _start(interval: Interval) -> Int32:
        return ptx.select(interval.empty, Int32(NO_KEY), interval.start)

    @staticmethod
    def _whole(band: Interval, own: Interval) -> Interval:
        """Returns keys that a token sees without a gap: both intervals if they touch, else the band's."""
        touch = cutlass.and_(own.start <= band.stop, band.start <= own.stop)
        joined = cutlass.and_(touch, cutlass.and_(own.start < own.stop, band.start < band.stop))
        start = ptx.select(joined, ptx.minimum(band.start, own.start), band.start)
        return Interval(start, ptx.select(joined, ptx.maximum(band.stop, own.stop), band.stop))

    def seen_by(self, token: Int32, first_col: Int32) -> Sees:
        token = ptx.minimum(token, self.last_token)
        band, own = (
            Interval(x.start - first_col, x.stop - first_col) for x in (self.band_of(token), self.range_of(token))
        )
        return lambda column: cutlass.or_(band.sees(column), own.sees(column))


# --- multi-item scoring -----------------------------------------------------------------------------------------------

# A query token sees a prefix and the keys of its own item up to itself, not those of other items. The keys between are
# hidden: tiles of which no row sees a key are left out of the order of kv tiles.


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
