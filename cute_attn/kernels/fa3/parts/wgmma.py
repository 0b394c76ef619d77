"""Tile of an MMA warpgroup: scores S = Q K^T and outputs O += P V by wgmma, 64 rows by all columns.

Two adjacent blocks of 8 columns of an accumulator (`MmaFragmentLayout`), rounded, are one A operand.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.formats import LINE

WARPGROUP_ROWS = 64


@dataclass(frozen=True)
class WarpgroupTile:
    """Operands and products of one MMA warpgroup's tile."""

    dtype: str
    memory: HopperMemory

    @property
    def scores_layout(self) -> MmaFragmentLayout:
        return MmaFragmentLayout(1, self.memory.tile.cols // 8)

    @property
    def output_layout(self) -> MmaFragmentLayout:
        return MmaFragmentLayout(1, self.memory.head_dim_vo // 8)

    def q_operand(self, address: Int32) -> Any:
        """Returns the A operand of S for the warpgroup's rows at `address`."""
        return self.k_operand(address)

    def k_operand(self, address: Int32) -> Int32:
        return cute.arch.make_warp_uniform(sm90.descriptor(address, 0))

    def rematerialize(self, q: Any) -> Any:
        """Recomputes the operand, so that values derived from it need not stay in registers."""
        return cute.arch.make_warp_uniform(q)

    def v_operand(self, address: Int32) -> Int32:
        return cute.arch.make_warp_uniform(sm90.descriptor(address, self.memory.tile.cols * LINE))

    def scores(self, q: Any, k: Int32) -> list[Float32]:
        """Starts S = Q K^T."""
        tile, steps = self.memory.tile, []
        for step in range(-(-self.memory.head_dim_qk * self.memory.item_bytes // 32)):
            column, within = step // 4, step % 4 * 32
            steps.append((column * tile.rows * LINE + within, column * tile.cols * LINE + within))
        return sm90.wgmma_from_shared(self.dtype, tile.cols, q, k, steps)

    def accumulate(self, out: list[Float32], p: list[Int32], v: Int32) -> list[Float32]:
        """Starts out + P V."""
        steps = range(0, self.memory.tile.cols * LINE, 16 * LINE)
        return sm90.wgmma_from_registers(self.dtype, self.dtype, self.memory.head_dim_vo, p, v, steps, out)

    def probabilities(self, s: list[Float32]) -> list[Int32]:
        return ptx.pack_pairs(self.dtype, s)


@dataclass(frozen=True)
class WarpgroupLanes:
    """Position of this thread among the MMA threads."""

    warpgroup: Int32  # index among the MMA warpgroups
    warp: Int32  # within the warpgroup
    lane: Int32

    @classmethod
    def of(cls) -> "WarpgroupLanes":
        """Reads the thread index at each call, so that values derived from it need not stay in registers in between."""
        thread = ptx.thread_index()
        warp = cute.arch.make_warp_uniform(thread >> 5)
        return cls((warp >> 2) - Int32(1), warp & 3, thread & 31)

    def row(self, slot: int) -> Int32:
        first = self.warpgroup * WARPGROUP_ROWS + self.warp * 16 + MmaFragmentLayout.lane_row(self.lane)
        return first + MmaFragmentLayout.row(slot)

    def first_col(self) -> Int32:
        return self.lane_col()

    def first_warp_col(self) -> Int32:
        """Returns 0: every warp sees all columns."""
        return Int32(0)

    def lane_col(self) -> Int32:
        return MmaFragmentLayout.lane_col(self.lane)


class RematerializedLanes:
    """`WarpgroupLanes` read at every use, so that nothing derived from them stays in registers in between."""

    def row(self, slot: int) -> Int32:
        return WarpgroupLanes.of().row(slot)

    def first_col(self) -> Int32:
        return WarpgroupLanes.of().first_col()

    def first_warp_col(self) -> Int32:
        return Int32(0)

    def lane_col(self) -> Int32:
        return WarpgroupLanes.of().lane_col()


AnyLanes = WarpgroupLanes | RematerializedLanes
