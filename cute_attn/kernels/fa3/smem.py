"""Shared-memory map of the Hopper kernel. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from cute_attn.kernels.blocks.smem_map import RingLayout, Scratch, StagedKvMemory, TileMemory
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.formats import LINE

PACKED_PIECE = 64  # bytes of packed e2m1 that rows are multiples of


@dataclass(frozen=True)
class HopperMemory(TileMemory):
    """Layout for 16-bit q, k and v: rings of operands only."""

    tile: HopperTile

    @staticmethod
    def of(spec: Fa3Spec) -> HopperMemory:
        narrow = {"fp8": Fp8Memory, "rope": RopeMemory, "nvfp4": Nvfp4KvMemory, "fp8_kv": Fp8KvMemory}
        return narrow.get(spec.operands, HopperMemory)(spec.tile, spec.head_dim_qk, spec.head_dim_vo)

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


class BlockScales(NamedTuple):
    """Block scales in a slot of staged rows: 4-byte words per row, and their offset."""

    words: int
    offset: int


@dataclass(frozen=True)
class Nvfp4KvMemory(Fp8KvMemory):
    """Layout for NVFP4 K and V under 16-bit q: a slot of a staging ring holds packed rows, in pieces of 64 bytes, and
    behind them the block scales of all rows.
    """

    def dim(self, operand: str) -> int:
        return self.head_dim_vo if operand == "v" else self.head_dim_qk

    def pitch(self, operand: str) -> int:
        return PACKED_PIECE * -(-self.dim(operand) // (2 * PACKED_PIECE))

    def scales(self, operand: str) -> BlockScales:
        return BlockScales(self.dim(operand) // 64, self.tile.cols * self.pitch(operand))

    def staged_bytes(self, operand: str) -> int:
        """Bytes of a tile and its scales: slots start at multiples of 128 bytes, as TMA needs."""
        words, offset = self.scales(operand)
        return -(-(offset + 4 * words * self.tile.cols) // LINE) * LINE


@dataclass(frozen=True)
class RopeMemory(HopperMemory):
    """Layout for 16-bit K that is rotated: its tiles are staged behind the rings of operands, in the same layout.
    Frequencies of 8 bytes per pair of dimensions follow.
    """

    @property
    def rings(self) -> tuple[RingLayout, ...]:
        k = RingLayout("staged_k", self.tile.staged, self.tile.cols * self.qk_columns * LINE)
        return (*super().rings, k)

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        return (Scratch("frequencies", self.head_dim_qk // 2 * 8),)
