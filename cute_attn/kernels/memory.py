"""Where the attention kernel's tiles lie in shared memory. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.spec import KV_BITS, Fa2Spec, Fa3Spec, HopperTile, Tile

LINE = 128  # bytes; rows are whole lines, see `blocks.smem`
RECORD_BYTES = 64  # of a query tile's description
SCALES_PITCH = 32  # bytes of a token's NVFP4 block scales: 16 for K, then 16 for V


@dataclass(frozen=True)
class SharedMemory:
    """Byte offsets: Q, then a ring of `stages` (K, V) pairs as stored, then the extras that only some variants have.

    Pitches are whole lines, wasteful for narrow rows of fp8 and NVFP4: eight threads copy any row.
    """

    tile: Tile
    head_dim_qk: int
    head_dim_vo: int
    rope: bool
    kv_dtype: str = ""

    @classmethod
    def of(cls, spec: Fa2Spec) -> SharedMemory:
        return cls(spec.tile, spec.head_dim_qk, spec.head_dim_vo, spec.pos_encoding == "rope", spec.kv_dtype)

    @property
    def qk_pitch(self) -> int:
        return -(-self.head_dim_qk * 2 // LINE) * LINE

    @property
    def vo_pitch(self) -> int:
        return -(-self.head_dim_vo * 2 // LINE) * LINE

    @property
    def k_bytes(self) -> int:
        """Of a row of K as stored."""
        return self.head_dim_qk * KV_BITS[self.kv_dtype] // 8

    @property
    def v_bytes(self) -> int:
        return self.head_dim_vo * KV_BITS[self.kv_dtype] // 8

    @property
    def k_pitch(self) -> int:
        return -(-self.k_bytes // LINE) * LINE

    @property
    def v_pitch(self) -> int:
        return -(-self.v_bytes // LINE) * LINE

    @property
    def ring(self) -> int:
        """Start of the K/V ring; Q lies before it."""
        return self.tile.rows * self.qk_pitch

    @property
    def v_offset(self) -> int:
        """V tile within a ring slot; K is at 0."""
        return self.tile.cols * self.k_pitch

    @property
    def scales_offset(self) -> int:
        """NVFP4 block scales within a ring slot."""
        return self.v_offset + self.tile.cols * self.v_pitch

    @property
    def slot_bytes(self) -> int:
        return self.scales_offset + (self.tile.cols * SCALES_PITCH if self.kv_dtype == "nvfp4" else 0)

    @property
    def ring_end(self) -> int:
        return self.ring + self.tile.stages * self.slot_bytes

    @property
    def operand_v(self) -> int:
        """V behind K where both have 16 bits: in the ring, or converted."""
        return self.tile.cols * self.qk_pitch

    @property
    def converted(self) -> int:
        """One (K, V) pair of 16 bits, made from stored ones of fewer."""
        return self.ring_end

    @property
    def rope_table(self) -> int:
        """(hi, lo) fp32 pairs of the rotation frequencies, one per pair of dimensions."""
        return self.converted + (self.operand_v + self.tile.cols * self.vo_pitch if self.kv_dtype else 0)

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
        total = self.rope_table + (self.head_dim_qk // 2 * 8 if self.rope else 0)
        if self.tile.warps_cols > 1:
            total = max(total, self.merge_outputs + self.tile.warps_cols * self.tile.rows * self.merge_pitch)
        return total


@dataclass(frozen=True)
class HopperMemory:
    """Byte offsets of the wgmma kernel: the Q ring, the K ring, the V ring, barriers, then the records of query tiles.

    A tile of 16-bit rows lies in columns of 64 elements: 128-byte lines of all rows, one column after the other, each
    as TMA boxes write it with the 128-byte swizzle.
    """

    item_bytes: ClassVar[int] = 2
    tile: HopperTile
    head_dim_qk: int
    head_dim_vo: int

    @staticmethod
    def of(spec: Fa3Spec) -> HopperMemory:
        kind = Fp8Memory if spec.fp8 else WidenedMemory if spec.kv_dtype else HopperMemory
        return kind(spec.tile, spec.head_dim_qk, spec.head_dim_vo)

    @property
    def line_items(self) -> int:
        return LINE // self.item_bytes

    @property
    def qk_columns(self) -> int:
        return -(-self.head_dim_qk // self.line_items)

    @property
    def vo_columns(self) -> int:
        return -(-self.head_dim_vo // self.line_items)

    @property
    def q_bytes(self) -> int:
        return self.tile.rows * self.qk_columns * LINE

    @property
    def k_bytes(self) -> int:
        return self.tile.cols * self.qk_columns * LINE

    @property
    def v_bytes(self) -> int:
        return self.tile.cols * self.vo_columns * LINE

    @property
    def k_ring(self) -> int:
        return self.tile.q_stages * self.q_bytes

    @property
    def v_ring(self) -> int:
        return self.k_ring + self.tile.stages * self.k_bytes

    @property
    def barriers(self) -> int:
        """8 bytes each, full and empty of every slot: Q's, K's, V's."""
        return self.v_ring + self.tile.stages * self.v_bytes

    @property
    def num_barriers(self) -> int:
        return 2 * self.tile.q_stages + 4 * self.tile.stages

    @property
    def records(self) -> int:
        return -(-(self.barriers + 8 * self.num_barriers) // RECORD_BYTES) * RECORD_BYTES

    @property
    def num_records(self) -> int:
        """A place in Q's ring has one: a tile's Q is given back before its results are written."""
        return 2 * self.tile.q_stages

    @property
    def bytes(self) -> int:
        return self.records + self.num_records * RECORD_BYTES


@dataclass(frozen=True)
class Fp8Memory(HopperMemory):
    """fp8 products want both operands contiguous along the sum: V tiles arrive in a ring of their own behind the other
    three, and lie transposed in the V ring, one line of keys a dimension, columns of 128 keys one after the other. Then
    the outputs of tiles summed up.
    """

    item_bytes: ClassVar[int] = 1

    @property
    def v_bytes(self) -> int:
        return -(-self.tile.cols // self.line_items) * self.head_dim_vo * LINE

    @property
    def arriving_v_bytes(self) -> int:
        return self.tile.cols * self.vo_columns * LINE

    @property
    def arriving_v_ring(self) -> int:
        return self.v_ring + self.tile.stages * self.v_bytes

    @property
    def sums(self) -> int:
        return self.arriving_v_ring + self.tile.stages * self.arriving_v_bytes

    @property
    def barriers(self) -> int:
        """Those of arriving V come last."""
        return self.sums + 2 * self.tile.rows * self.head_dim_vo

    @property
    def num_barriers(self) -> int:
        return super().num_barriers + 2 * self.tile.stages


@dataclass(frozen=True)
class WidenedMemory(HopperMemory):
    """K and V tiles of 8 bits arrive in rings of their own behind the other three, rows side by side: as many bytes as
    their columns of 16 bits have elements.
    """

    @property
    def arriving_k_pitch(self) -> int:
        return self.qk_columns * self.line_items

    @property
    def arriving_v_pitch(self) -> int:
        return self.vo_columns * self.line_items

    @property
    def arriving_k_ring(self) -> int:
        return self.v_ring + self.tile.stages * self.v_bytes

    @property
    def arriving_v_ring(self) -> int:
        return self.arriving_k_ring + self.tile.arriving * self.tile.cols * self.arriving_k_pitch

    @property
    def barriers(self) -> int:
        """Those of the arriving tiles come last."""
        return self.arriving_v_ring + self.tile.arriving * self.tile.cols * self.arriving_v_pitch

    @property
    def num_barriers(self) -> int:
        return super().num_barriers + 4 * self.tile.arriving
