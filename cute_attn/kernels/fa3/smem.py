"""Shared-memory map of the Hopper kernel. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.formats import LINE

RECORD_BYTES = 64  # of a query tile's description


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
    three, and lie transposed in the V ring, one line of keys a dimension, columns of lines one after the other. Then
    the outputs of tiles summed up.
    """

    item_bytes: ClassVar[int] = 1

    @property
    def key_line(self) -> int:
        """Bytes of a line of keys."""
        return LINE if self.tile.cols > LINE // 2 else LINE // 2

    @property
    def v_bytes(self) -> int:
        return -(-self.tile.cols // self.key_line) * self.head_dim_vo * self.key_line

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
