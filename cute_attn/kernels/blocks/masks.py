"""Masks: which kv columns a row sees, and which kv tiles need a mask.

Masked tiles come first: the order does not matter to softmax, and the loop over fully visible tiles then needs no mask
code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import RegisterLayout, TilePosition
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
    lanes: TilePosition

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
                bit = words[column // 32] & Int32(_signed(1 << column % 32))
                out[register] = ptx.select(bit != Int32(0), out[register], Float32(ptx.NEG_INF))
        return out

    def row_words(self, token: Int32, col: Int32) -> list[Int32]:
        """Loads the mask bits of the warp's columns as 32-bit words, shifted so that this thread's first column is bit
        0.

        Words start at the warp's first column, not at the thread's: both bits of an MMA pair then lie in one word.
        """
        count = self.layout.places(0)[-1][1] // 32 + 1
        bit = Int64(token) * Int64(self.kv_len) + Int64(col)
        address = self.bits + (bit >> Int64(3))
        aligned = address & Int64(-4)
        shift = Int32((address & Int64(3)) * Int64(8) + (bit & Int64(7)))
        raw = [load_mask_word(aligned + Int64(4 * i), self.bits_end) for i in range(count + 1)]
        inner = self.lanes.lane_col()
        words = [funnel_shift_right(raw[i], raw[i + 1], shift) for i in range(count)]
        return [word >> inner for word in words]


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


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def funnel_shift_right(low: Int32, high: Int32, shift: Int32) -> Int32:
    """Returns the low 32 bits of (high:low) >> shift, for shift in [0, 31]."""
    return ptx.asm("shf.r.wrap.b32 $0, $1, $2, $3;", [Int32], [low, high, shift], pure=True)


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
