"""Shared-memory map of the kernel for latent attention. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.mla.spec import LATENT, ROPE, MlaSpec

ITEM_BYTES = 2
PADDING = 16  # bytes behind a row of P: rows of an ldmatrix then differ in bank
LANES = 8  # threads of a row in copies
SCALE_BYTES = 4  # of the scale of a group


@dataclass(frozen=True)
class MlaMemory:
    """A ring of tiles as the cache has them; over 8 bits also one tile in 16; the query rows, P, and numbers per row.
    Rows of 16-bit tiles and of queries have whole lines, swizzled.

    At the end of a segment its outputs, fp32 [rows, LATENT], take the place of tiles and query rows.
    """

    spec: MlaSpec
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
    def tile(self) -> int:
        """Offset of the tile in 16 bits, and end of the ring."""
        return self.spec.stages * self.slot_bytes

    @property
    def q(self) -> int:
        converted = self.spec.cols * self.row_bytes if self.spec.kv_bits == 8 else 0
        return self.tile + converted

    @property
    def p(self) -> int:
        return self.q + self.rows * self.row_bytes

    @property
    def p_pitch(self) -> int:
        return self.spec.cols * ITEM_BYTES + PADDING

    @property
    def columns(self) -> int:
        """Offset of a number per row from each warp of a row group."""
        return self.p + self.rows * self.p_pitch

    @property
    def stats(self) -> int:
        """Offset of (maximum, sum) per row."""
        return self.columns + self.spec.slices * self.rows * 4

    @property
    def ticket(self) -> int:
        """Offset of one word: the number of CTAs that had written their partials before this one."""
        return self.stats + self.rows * 8

    @property
    def bytes(self) -> int:
        return self.ticket + 16
