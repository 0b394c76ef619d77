"""Shared-memory map of the kernel for latent attention. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import MemoryMap, MemoryRegion
from cute_attn.kernels.mla.spec import LATENT, ROPE, MlaSpec

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
