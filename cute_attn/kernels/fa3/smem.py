"""Shared-memory map of the Hopper kernel. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.formats import LINE

RECORD_BYTES = 64  # of a query tile's record


@dataclass(frozen=True)
class HopperMemory:
    """Byte offsets of the wgmma kernel: the Q ring, the K ring, the V ring, barriers, then the records of query tiles.

    A tile of 16-bit rows is stored in columns of 64 elements: 128-byte lines of all rows, one column after the other,
    each as TMA writes it with the 128-byte swizzle.
    """

    item_bytes: ClassVar[int] = 2
    tile: HopperTile
    head_dim_qk: int
    head_dim_vo: int

    @staticmethod
    def of(spec: Fa3Spec) -> HopperMemory:
        kind = Fp8Memory if spec.fp8 else Fp8KvMemory if spec.kv_dtype else HopperMemory
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
        """Start of the barriers, 8 bytes each, full and empty of every slot: Q's, K's, V's."""
        return self.v_ring + self.tile.stages * self.v_bytes

    @property
    def num_barriers(self) -> int:
        return 2 * self.tile.q_stages + 4 * self.tile.stages

    @property
    def records(self) -> int:
        return -(-(self.barriers + 8 * self.num_barriers) // RECORD_BYTES) * RECORD_BYTES

    @property
    def num_records(self) -> int:
        """One record per `PipelineState` of Q's ring: Q is released before the tile's results are written."""
        return 2 * self.tile.q_stages

    @property
    def bytes(self) -> int:
        return self.records + self.num_records * RECORD_BYTES


@dataclass(frozen=True)
class Fp8Memory(HopperMemory):
    """Layout for fp8, whose products need both operands contiguous along the sum: V tiles are staged in a ring of their
    own behind the other three, and are transposed into the V ring, one line of keys per dimension, columns of lines one
    after the other. The output sums follow.
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
    def staged_v_bytes(self) -> int:
        return self.tile.cols * self.vo_columns * LINE

    @property
    def staged_v_ring(self) -> int:
        return self.v_ring + self.tile.stages * self.v_bytes

    @property
    def sums(self) -> int:
        return self.staged_v_ring + self.tile.stages * self.staged_v_bytes

    @property
    def barriers(self) -> int:
        """Start of the barriers; those of staged V come last."""
        return self.sums + 2 * self.tile.rows * self.head_dim_vo

    @property
    def num_barriers(self) -> int:
        return super().num_barriers + 2 * self.tile.stages


@dataclass(frozen=True)
class Fp8KvMemory(HopperMemory):
    """Layout for fp8 K and V under 16-bit q: their tiles are staged in rings of their own behind the other three, with
    contiguous rows of as many bytes as the 16-bit columns have elements.
    """

    @property
    def staged_k_pitch(self) -> int:
        return self.qk_columns * self.line_items

    @property
    def staged_v_pitch(self) -> int:
        return self.vo_columns * self.line_items

    @property
    def staged_k_ring(self) -> int:
        return self.v_ring + self.tile.stages * self.v_bytes

    @property
    def staged_v_ring(self) -> int:
        return self.staged_k_ring + self.tile.staged * self.tile.cols * self.staged_k_pitch

    @property
    def barriers(self) -> int:
        """Start of the barriers; those of the staged tiles come last."""
        return self.staged_v_ring + self.tile.staged * self.tile.cols * self.staged_v_pitch

    @property
    def num_barriers(self) -> int:
        return super().num_barriers + 4 * self.tile.staged
