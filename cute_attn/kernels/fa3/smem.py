"""Shared-memory map of the Hopper kernel. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.blocks.smem_map import RingLayout, Scratch, StagedKvMemory, TileMemory
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.formats import LINE


@dataclass(frozen=True)
class HopperMemory(TileMemory):
    """Layout for 16-bit q, k and v: rings of operands only."""

    tile: HopperTile

    @staticmethod
    def of(spec: Fa3Spec) -> HopperMemory:
        kind = Fp8Memory if spec.fp8 else Fp8KvMemory if spec.kv_dtype else HopperMemory
        return kind(spec.tile, spec.head_dim_qk, spec.head_dim_vo)

    @property
    def rings(self) -> tuple[RingLayout, ...]:
        tile = self.tile
        return (
            RingLayout("q", tile.q_stages, tile.rows * self.qk_columns * LINE),
            RingLayout("k", tile.stages, tile.cols * self.qk_columns * LINE),
            RingLayout("v", tile.stages, self.v_bytes),
        )

    @property
    def v_bytes(self) -> int:
        """Bytes of a V operand."""
        return self.tile.cols * self.vo_columns * LINE


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
        return -(-self.tile.cols // self.key_line) * self.transposed_dims * self.key_line

    @property
    def transposed_dims(self) -> int:
        """Dimensions of V with a line of keys each: transposed in blocks of 64, of which the last may hold zeros."""
        return -(-self.head_dim_vo // 64) * 64

    @property
    def rings(self) -> tuple[RingLayout, ...]:
        return (*super().rings, RingLayout("staged_v", self.tile.stages, self.tile.cols * self.vo_columns * LINE))

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        return (Scratch("sums", 2 * self.tile.rows * self.head_dim_vo),)


@dataclass(frozen=True)
class Fp8KvMemory(StagedKvMemory, HopperMemory):
    """Layout for fp8 K and V under 16-bit q: their tiles are staged in rings of their own behind the other three."""

    tile: HopperTile

    @property
    def rings(self) -> tuple[RingLayout, ...]:
        return (*super().rings, *self.staged_rings(self.tile.staged))
