"""Where rows go: from requests, positions and a page table, from slot numbers, or row by row.

Indices are int32 or int64; one that does not fit 32 bits counts as negative, and rows with negative or too large
indices go nowhere. No memory outside the index tensors and the cache is accessed, whatever the indices are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx


class Indices(NamedTuple):
    """Tensor of int32, or of int64 if `wide` is not 0; `step`: bytes from an index to the next."""

    address: Int64
    step: Int64
    wide: Int32

    def at(self, i: Int32) -> Int32:
        """Loads index i; -1 if it does not fit 32 bits."""
        place = ptx.mad_u32(i, self.step, self.address)
        low = ptx.ld_global_u32(place)
        high = ptx.load_word_if(self.wide != Int32(0), place + Int64(4))
        fits = cutlass.or_(self.wide == Int32(0), high == (low >> 31))
        return ptx.select(fits, low, Int32(-1))


@dataclass(frozen=True)
class Slot:
    """A token's place in a cache, if there is one."""

    exists: Boolean
    page: Int32
    offset: Int32


@cute.jit
def by_page_table(p: Any, row: Int32) -> Slot:
    """Returns the slot of a row by its request and position."""
    request = p.batch_indices.at(row)
    position = p.positions.at(row)
    exists, page, offset = Boolean(False), Int32(0), Int32(0)
    if cutlass.and_(cutlass.and_(request >= 0, request < p.batch_size), position >= 0):
        begin = p.kv_indptr.at(request)
        end = p.kv_indptr.at(request + 1)
        number = p.page_size.quotient(position)
        has_page = cutlass.and_(cutlass.and_(begin >= 0, begin < end), number < end - begin)
        entry = begin + number
        if cutlass.and_(has_page, entry < p.num_indices):
            page = p.kv_indices.at(entry)
            offset = position - number * p.page_size.value
            exists = cutlass.and_(page >= 0, page < p.num_pages)
    return Slot(exists, page, offset)


def by_number(p: Any, row: Int32) -> Slot:
    """Returns the slot of a row by its number: page * page_size + offset."""
    slot = p.slot_mapping.at(row)
    exists = cutlass.and_(slot >= 0, slot < p.num_slots)
    page = p.page_size.quotient(slot)
    return Slot(exists, page, slot - page * p.page_size.value)


def of_output(p: Any, row: Int32) -> Slot:
    """Returns the slot of row t of an output with pages of one token: page t."""
    return Slot(Boolean(True), row, Int32(0))


SLOTS: dict[str, Callable[[Any, Int32], Slot]] = {"pages": by_page_table, "mapped": by_number, "rows": of_output}
