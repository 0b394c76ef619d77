"""Where the attention kernel's tiles lie in shared memory. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.spec import Fa2Spec, Fa3Spec, HopperTile, Tile

LINE = 128  # bytes; rows are whole lines, see `blocks.smem`


@dataclass(frozen=True)
class SharedMemory:
    """Byte offsets: Q, then a ring of `stages` (K, V) pairs, then the extras that only some variants have."""

    tile: Tile
    head_dim_qk: int
    head_dim_vo: int
    rope: bool

    @classmethod
    def of(cls, spec: Fa2Spec) -> SharedMemory:
        return cls(spec.tile, spec.head_dim_qk, spec.head_dim_vo, spec.pos_encoding == "rope")

    @property
    def qk_pitch(self) -> int:
        return -(-self.head_dim_qk * 2 // LINE) * LINE

    @property
    def vo_pitch(self) -> int:
        return -(-self.head_dim_vo * 2 // LINE) * LINE

    @property
    def ring(self) -> int:
        """Start of the K/V ring; Q lies before it."""
        return self.tile.rows * self.qk_pitch

    @property
    def v_offset(self) -> int:
        """V tile within a ring slot; K is at 0."""
        return self.tile.cols * self.qk_pitch

    @property
    def slot_bytes(self) -> int:
        return self.v_offset + self.tile.cols * self.vo_pitch

    @property
    def ring_end(self) -> int:
        return self.ring + self.tile.stages * self.slot_bytes

    @property
    def rope_table(self) -> int:
        """(hi, lo) fp32 pairs of the rotation frequencies, one per pair of dimensions."""
        return self.ring_end

    @property
    def merge_pitch(self) -> int:
        """Row of fp32 outputs when the warps of a row merge; padded so that a quad's rows differ in bank."""
        return self.head_dim_vo * 4 + 32

    @property
    def merge_outputs(self) -> int:
        """Drained memory holds (max, sum) per warp column and row, then the outputs."""
        return self.tile.warps_cols * self.tile.rows * 8

    @property
    def bytes(self) -> int:
        total = self.ring_end + (self.head_dim_qk // 2 * 8 if self.rope else 0)
        if self.tile.warps_cols > 1:
            total = max(total, self.merge_outputs + self.tile.warps_cols * self.tile.rows * self.merge_pitch)
        return total


@dataclass(frozen=True)
class HopperMemory:
    """Byte offsets of the wgmma kernel: Q, the K ring, the V ring, then barriers and the id of the tile in work.

    A tile of 16-bit rows lies in columns of 64 elements: 128-byte lines of all rows, one column after the other, each
    as one TMA box writes it with the 128-byte swizzle.
    """

    tile: HopperTile
    head_dim_qk: int
    head_dim_vo: int

    @classmethod
    def of(cls, spec: Fa3Spec) -> HopperMemory:
        return cls(spec.tile, spec.head_dim_qk, spec.head_dim_vo)

    @property
    def q_bytes(self) -> int:
        return self.tile.rows * self.head_dim_qk * 2

    @property
    def k_bytes(self) -> int:
        return self.tile.cols * self.head_dim_qk * 2

    @property
    def v_bytes(self) -> int:
        return self.tile.cols * self.head_dim_vo * 2

    @property
    def k_ring(self) -> int:
        return self.q_bytes

    @property
    def v_ring(self) -> int:
        return self.k_ring + self.tile.stages * self.k_bytes

    @property
    def barriers(self) -> int:
        """8 bytes each: q full, q empty, then full and empty of every K slot, then of every V slot."""
        return self.v_ring + self.tile.stages * self.v_bytes

    @property
    def work(self) -> int:
        return self.barriers + 8 * (2 + 4 * self.tile.stages)

    @property
    def bytes(self) -> int:
        return self.work + 16
