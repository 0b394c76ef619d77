"""Ranges of keys besides the band: a query token sees the keys of the band, and those of a range of its own."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.masks import BandMask, Sees, TileOrder

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
