"""Shared memory layout of the attention kernels, as plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import MemoryMap, MemoryRegion
from cute_attn.kernels.fa2.spec import Fa2Spec, Tile
from cute_attn.kernels.formats import KV_BITS, LINE

SCALES_PITCH = 32  # bytes of NVFP4 block scales per token: 16 for K, then 16 for V


@dataclass(frozen=True)
class SharedMemory(MemoryMap):
    """Byte offsets of the mma.sync kernel: Q, a ring of `stages` (K, V) pairs as stored, then extras of some variants.

    Pitches are whole lines, which wastes space for short rows of fp8 and NVFP4: eight threads copy any row.
    """

    tile: Tile
    head_dim_qk: int
    head_dim_vo: int
    rope: bool
    kv_dtype: str = ""
    fp8: bool = False  # operands of 8 bits, else of 16
    q = MemoryRegion(lambda m: m.tile.rows * m.qk_pitch)
    ring = MemoryRegion(lambda m: m.tile.stages * m.slot_bytes)
    converted = MemoryRegion(
        lambda m: m.operand_v + m.tile.cols * m.vo_pitch if m.kv_dtype else 0
    )  # K and V in 16 bits
    p = MemoryRegion(lambda m: m.tile.exchange * m.tile.rows * m.p_pitch)  # of warps that exchange it
    columns = MemoryRegion(lambda m: m.tile.exchange * m.tile.warps_cols * m.tile.rows * 4)  # fp32, per warp column
    row_factors = MemoryRegion(lambda m: m.tile.exchange * m.tile.rows * 4)  # fp32, of the output rows
    # Rotation frequencies of 8 bytes, one per pair of dimensions.
    rope_table = MemoryRegion(lambda m: m.rope * m.head_dim_qk // 2 * 8)

    @classmethod
    def of(cls, spec: Fa2Spec) -> SharedMemory:
        rope = spec.pos_encoding == "rope"
        return cls(spec.tile, spec.head_dim_qk, spec.head_dim_vo, rope, spec.kv_dtype, spec.fp8)

    @property
    def rows(self) -> int:
        return self.tile.rows

    @property
    def warps_cols(self) -> int:
        return self.tile.warps_cols

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of the operands."""
        return 1 if self.fp8 else 2

    @property
    def stored_bits(self) -> int:
        """Bits of an element of K and V as stored."""
        return KV_BITS[self.kv_dtype] if self.kv_dtype else 8 * self.item_bytes

    @property
    def q_bytes(self) -> int:
        """Bytes of a row of Q."""
        return self.head_dim_qk * self.item_bytes

    @property
    def qk_pitch(self) -> int:
        return -(-self.q_bytes // LINE) * LINE

    @property
    def vo_pitch(self) -> int:
        return -(-self.head_dim_vo * self.item_bytes // LINE) * LINE

    @property
    def k_bytes(self) -> int:
        """Bytes of a stored row of K."""
        return self.head_dim_qk * self.stored_bits // 8

    @property
    def v_bytes(self) -> int:
        return self.head_dim_vo * self.stored_bits // 8

    @property
    def k_pitch(self) -> int:
        return -(-self.k_bytes // LINE) * LINE

    @property
    def v_pitch(self) -> int:
        return -(-self.v_bytes // LINE) * LINE

    @property
    def staging_pitch(self) -> int:
        """Pitch of 16-bit output rows, which are staged in place of Q and of the drained ring."""
        return max(self.qk_pitch, -(-self.head_dim_vo * 2 // LINE) * LINE)

    @property
    def v_offset(self) -> int:
        """Offset of the V tile within a ring slot; K is at 0."""
        return self.tile.cols * self.k_pitch

    @property
    def scales_offset(self) -> int:
        """Offset of the NVFP4 block scales within a ring slot."""
        return self.v_offset + self.tile.cols * self.v_pitch

    @property
    def slot_bytes(self) -> int:
        return self.scales_offset + (self.tile.cols * SCALES_PITCH if self.kv_dtype == "nvfp4" else 0)

    @property
    def operand_v(self) -> int:
        """Offset of 16-bit V from 16-bit K, in the ring or converted."""
        return self.tile.cols * self.qk_pitch

    @property
    def slice_bytes(self) -> int:
        """Bytes of 16-bit output columns, or columns of V, per warp of those that exchange P: whole lines."""
        return self.head_dim_vo * 2 * 32 // self.tile.threads

    @property
    def p_pitch(self) -> int:
        """Pitch of 16-bit rows of P that warps exchange: an odd number of 16-byte chunks, so that the eight rows of an
        ldmatrix differ in bank.
        """
        return self.tile.cols * 2 + 16

    @property
    def merge_pitch(self) -> int:
        """Pitch of fp32 output rows when the warps of a row merge; padded so that the rows of a quad differ in bank."""
        return self.head_dim_vo * 4 + 32

    @property
    def merge_outputs(self) -> int:
        """Offset of the outputs to merge, after (max, sum) per warp column and row; all in drained memory."""
        return self.tile.warps_cols * self.tile.rows * 8

    @property
    def bytes(self) -> int:
        total = super().bytes
        if not self.tile.one_team:
            total = max(total, self.merge_outputs + self.tile.warps_cols * self.tile.rows * self.merge_pitch)
        return max(total, self.tile.rows * self.staging_pitch)
