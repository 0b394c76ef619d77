"""Masks of threads that own a row: a word per chunk of 32 columns, bit i set where column i is hidden from the row.

They compose as those of `blocks/masks.py` do, which compare every column.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cutlass import Int32, Int64

from cute_attn.kernels.blocks.masks import (
    Band,
    KeyBounds,
    columns_before,
    columns_from,
    funnel_shift_right,
    mask_words,
)
from cute_attn.kernels.blocks.rows import PackedRows

Word = Callable[[], Int32]


def identity(word: Int32) -> Int32:
    return word


@dataclass(frozen=True)
class StopWords:
    """Mask of a band without left bound: hides the columns from a row's stop."""

    band: Band
    rows: PackedRows
    row: Int32

    @property
    def token(self) -> Int32:
        return self.rows.token(self.row)

    def word(self, kv_start: Int32) -> Int32:
        """Returns the hidden ones of the columns from `kv_start`."""
        return columns_from(self.band.stop(self.token) - kv_start)

    def words(self, kv_starts: Sequence[Int32]) -> list[Word]:
        """Returns the words of several chunks, computed where they are used: until then they take no registers."""
        return [partial(self.word, kv_start) for kv_start in kv_starts]


class BandWords(StopWords):
    """Mask of a band with a left bound."""

    def word(self, kv_start: Int32) -> Int32:
        return super().word(kv_start) | columns_before(self.token + self.band.left - kv_start)


class EarlyWords(BandWords):
    """Base of masks whose words are loaded, or follow from many bounds: they are computed before S is waited for."""

    def words(self, kv_starts: Sequence[Int32]) -> list[Word]:
        return [partial(identity, self.word(kv_start)) for kv_start in kv_starts]


@dataclass(frozen=True)
class PackedWords(EarlyWords):
    """Custom mask within the band: one bit per (token, kv) pair in little bit order, rows not padded."""

    bits: Int64
    bits_end: Int64
    kv_len: Int32

    def word(self, kv_start: Int32) -> Int32:
        (low, high), shift = mask_words(self, self.token, kv_start, 2)
        return super().word(kv_start) | ~funnel_shift_right(low, high, shift)


@dataclass(frozen=True)
class MultiItemWords(EarlyWords):
    """Band without the keys between the prefix and the row's item."""

    prefix_end: Int32
    item_start: Int32

    @classmethod
    def of(cls, band: Band, rows: PackedRows, row: Int32, bounds: KeyBounds) -> "MultiItemWords":
        """Loads the row's bounds, once per work item."""
        return cls(band, rows, row, *bounds.of(row))

    def word(self, kv_start: Int32) -> Int32:
        gap = columns_from(self.prefix_end - kv_start) & columns_before(self.item_start - kv_start)
        return super().word(kv_start) | gap
