"""Shared-memory map of the kernel for latent attention. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import BARRIER_BYTES, MemoryMap, MemoryRegion
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.mla.spec import LATENT, ROPE, HopperMlaSpec, MlaSpec

ITEM_BYTES = 2
PADDING = 16  # bytes behind a row of P: rows of an ldmatrix then differ in bank
LANES = 8  # threads of a row in copies
SCALE_BYTES = 4  # of the scale of a group


@dataclass(frozen=True)
class MlaMemory(MemoryMap):
    """A ring of tiles as the cache has them; over 8 bits also one tile in 16; the query rows, P, and numbers per row.
    Rows of 16-bit tiles and of queries have whole lines, swizzled.

    At the end of a segment its outputs, fp32 [rows, LATENT], take the place of tiles and query rows.
    """

    spec: MlaSpec
    ring = MemoryRegion(lambda m: m.spec.stages * m.slot_bytes)
    tile = MemoryRegion(lambda m: m.spec.cols * m.row_bytes if m.spec.kv_bits == 8 else 0)  # in 16 bits
    q = MemoryRegion(lambda m: m.rows * m.row_bytes)
    p = MemoryRegion(lambda m: m.rows * m.p_pitch)
    columns = MemoryRegion(lambda m: m.spec.slices * m.rows * 4)  # a number per row from each warp of a row group
    stats = MemoryRegion(lambda m: m.rows * 8)  # (maximum, sum) per row
    ticket = MemoryRegion(lambda m: 16)  # one word: the number of CTAs that had written their partials before this one
    # As the merge of XQA reads it: one state.
    tile_dim = LATENT  # columns of an output row
    ring_bytes = 0  # distance of the outputs of two states
    outputs = 0  # offset

    def __post_init__(self) -> None:
        if self.rows * LATENT * 4 > self.p:
            raise ValueError(f"{self.spec}: outputs must fit the memory of tiles and query rows")

    @property
    def rows(self) -> int:
        return self.spec.rows

    @property
    def warps_cols(self) -> int:
        """Warps that have the same rows."""
        return self.spec.slices

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a 16-bit tile, and of a query row."""
        return self.spec.columns * ITEM_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.spec.cols * (self.token_bytes + self.scale_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of a row of the cache, without scales."""
        return (LATENT * self.spec.kv_bits + ROPE * self.spec.rope_bits) // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a row in a slot: each of its threads has a place for one."""
        return LANES * SCALE_BYTES if self.spec.grouped else 0

    @property
    def p_pitch(self) -> int:
        return self.spec.cols * ITEM_BYTES + PADDING


# --- wgmma ------------------------------------------------------------------------------------------------------------


HALVES = 2  # of a tile
ROTATED = 8  # the column of lines with rotated numbers
RECORD_BYTES = 48  # of a segment, as the producers leave it for the MMA warpgroups


@dataclass(frozen=True)
class HopperMlaMemory(MemoryMap):
    """Two slots of a tile each, the query rows, P, and numbers per row.

    Tiles, query rows and P have columns of lines, one after the other: 128 bytes of all rows, swizzled.
    """

    spec: HopperMlaSpec
    tiles = MemoryRegion(lambda m: m.spec.stages * m.slot_bytes)
    q = MemoryRegion(lambda m: m.columns * m.spec.rows * LINE)
    p = MemoryRegion(lambda m: m.spec.rows * LINE)
    shifts = MemoryRegion(lambda m: 2 * m.spec.rows * 4)  # a negated anchor per row from each MMA warpgroup
    totals = MemoryRegion(lambda m: 2 * m.spec.rows * 4)  # a sum per row from each MMA warpgroup
    # Full and empty barriers of Q, and of both halves of each slot.
    barriers = MemoryRegion(lambda m: 2 * BARRIER_BYTES + HALVES * m.half_barrier_bytes)
    records = MemoryRegion(lambda m: 2 * RECORD_BYTES)  # of segments, used in turn
    ticket = MemoryRegion(lambda m: 16)  # one word: the number of CTAs that had stored their states before this one

    @property
    def columns(self) -> int:
        """Columns of lines of a tile's rows, in 16 bits."""
        return self.spec.columns * 2 // LINE

    @property
    def halves(self) -> tuple[range, ...]:
        """Columns of lines that are filled and released on their own: the latent ones of each half are the V operand of
        one MMA warpgroup. The rotated columns belong to the second."""
        return range(4), range(4, self.columns)

    @property
    def column_bytes(self) -> int:
        return self.spec.cols * LINE

    @property
    def slot_bytes(self) -> int:
        return self.columns * self.column_bytes

    @property
    def half_barrier_bytes(self) -> int:
        """Bytes of the full and empty barriers of one half of all slots."""
        return 2 * self.spec.stages * BARRIER_BYTES
