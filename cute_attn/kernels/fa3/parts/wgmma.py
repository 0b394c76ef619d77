"""A math warpgroup's tile on wgmma: scores S = Q K^T and outputs O += P V, 64 rows by all columns.

An accumulator is a flat list: register 4 n + {0, 1} is row lane // 4 of the warp's 16, columns 8 n + 2 (lane % 4) +
{0, 1}; 4 n + {2, 3} the row 8 below. Two neighbouring blocks of 8 columns, rounded, are one A operand.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.formats import LINE

ROWS = 64  # of a warpgroup


@dataclass(frozen=True)
class GroupTile:
    dtype: str
    memory: HopperMemory
    m_blocks: int = 1
    row_slots: int = 2

    @property
    def n_blocks(self) -> int:
        return self.memory.tile.cols // 8

    @property
    def d_blocks(self) -> int:
        return self.memory.head_dim_vo // 8

    def zeros(self, blocks: int) -> list[Float32]:
        return [Float32(0.0) for _ in range(4 * blocks)]

    def q_operand(self, address: Int32) -> Any:
        """Of a warpgroup's rows."""
        return self.k_operand(address)

    def k_operand(self, address: Int32) -> Int32:
        return cute.arch.make_warp_uniform(sm90.descriptor(address, 0))

    def afresh(self, q: Any) -> Any:
        """The operand again, lest what depends on it stay in registers."""
        return cute.arch.make_warp_uniform(q)

    def v_operand(self, address: Int32) -> Int32:
        return cute.arch.make_warp_uniform(sm90.descriptor(address, self.memory.tile.cols * LINE))

    def scores(self, q: Any, k: Int32) -> list[Float32]:
        """Starts S."""
        tile, steps = self.memory.tile, []
        for step in range(self.memory.head_dim_qk * self.memory.item_bytes // 32):
            column, within = step // 4, step % 4 * 32
            steps.append((column * tile.rows * LINE + within, column * tile.cols * LINE + within))
        return sm90.wgmma_from_shared(self.dtype, tile.cols, q, k, steps)

    def accumulate(self, out: list[Float32], p: list[Int32], v: Int32) -> list[Float32]:
        """Starts out + P V."""
        steps = range(0, self.memory.tile.cols * LINE, 16 * LINE)
        return sm90.wgmma_from_registers(self.dtype, self.dtype, self.memory.head_dim_vo, p, v, steps, out)

    def probabilities(self, s: list[Float32]) -> list[Int32]:
        return [ptx.pack_16(self.dtype, s[i], s[i + 1]) for i in range(0, len(s), 2)]


@dataclass(frozen=True)
class GroupLanes:
    """Where this thread stands among the math threads."""

    warp_col: ClassVar[int] = 0  # every warp sees all columns
    group: Int32  # warpgroup
    warp: Int32  # of the warpgroup
    lane: Int32

    @classmethod
    def of(cls) -> "GroupLanes":
        """Read anew where it is called for: what follows from it need not stay in registers meanwhile."""
        thread = ptx.asm("mov.u32 $0, %tid.x;", [Int32])
        warp = cute.arch.make_warp_uniform(thread >> 5)
        return cls((warp >> 2) - Int32(1), warp & 3, thread & 31)

    def row(self, memory: HopperMemory, slot: int) -> Int32:
        return self.group * ROWS + self.warp * 16 + self.lane // 4 + slot * 8

    def first_col(self, memory: HopperMemory) -> Int32:
        return self.lane % 4 * 2


class FreshLanes:
    """`GroupLanes` read anew at every use: nothing that follows from them is in registers meanwhile."""

    warp_col: ClassVar[int] = 0

    @property
    def lane(self) -> Int32:
        return GroupLanes.of().lane

    def row(self, memory: HopperMemory, slot: int) -> Int32:
        return GroupLanes.of().row(memory, slot)

    def first_col(self, memory: HopperMemory) -> Int32:
        return GroupLanes.of().first_col(memory)


AnyLanes = GroupLanes | FreshLanes
