"""Tile of an MMA warpgroup: scores S = Q K^T and outputs O += P V by wgmma, 64 rows by all columns.

Two adjacent blocks of 8 columns of an accumulator (`MmaFragmentLayout`), rounded, are one A operand.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.register_layout import FragmentPosition, MmaFragmentLayout
from cute_attn.kernels.blocks.sm90 import STEP_BYTES, operand_offset
from cute_attn.kernels.blocks.smem import swizzled
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

    @property
    def score_steps(self) -> range:
        """Returns the steps of the sum of a score. Of a last half one TMA has filled the rest with zeros."""
        return range(-(-self.memory.head_dim_qk * self.memory.item_bytes // STEP_BYTES))

    def q_operand(self, address: Int32) -> sm90.MatrixA:
        """Returns the A operand of S for the warpgroup's rows at `address`: the tile's `q_registers` columns are loaded
        into registers, which leaves more bandwidth of shared memory to other operands; the products read the rest.
        """
        tile, steps = self.memory.tile, self.score_steps
        held = steps[: -(-tile.q_registers * self.memory.item_bytes // STEP_BYTES)]
        fragments: list[Int32] = []
        if held:
            lanes = WarpgroupLanes.of()
            row, half = lanes.warp * 16 + lanes.lane % 16, lanes.lane // 16
            for step in held:
                column, within = divmod(step, LINE // STEP_BYTES)
                fragments += ptx.ldmatrix_x4(
                    address + swizzled(row, half + within * 2, LINE), column * tile.rows * LINE
                )
        rest = steps[len(held) :]
        return sm90.MatrixA(
            fragments, self.k_operand(address) if rest else None, [operand_offset(step, tile.rows) for step in rest]
        )

    def k_operand(self, address: Int32) -> Int32:
        return cute.arch.make_warp_uniform(sm90.descriptor(address, 0))

    def rematerialize(self, q: sm90.MatrixA) -> sm90.MatrixA:
        """Recomputes the descriptor, so that values derived from it need not stay in registers."""
        return q if q.descriptor is None else q._replace(descriptor=cute.arch.make_warp_uniform(q.descriptor))

    def v_operand(self, address: Int32) -> Int32:
        return cute.arch.make_warp_uniform(sm90.descriptor(address, self.memory.tile.cols * LINE))

    def scores(self, q: sm90.MatrixA, k: Int32) -> list[Float32]:
        """Starts S = Q K^T."""
        cols = self.memory.tile.cols
        steps = [operand_offset(step, cols) for step in self.score_steps]
        return sm90.wgmma(self.dtype, self.dtype, cols, q, k, steps, k_major=True)

    def accumulate(self, out: list[Float32], p: list[Int32], v: Int32) -> list[Float32]:
        """Starts out + P V."""
        steps = range(0, self.memory.tile.cols * LINE, 16 * LINE)
        return sm90.wgmma(self.dtype, self.dtype, self.memory.head_dim_vo, sm90.MatrixA(p), v, steps, out)

    def probabilities(self, s: list[Float32]) -> list[Int32]:
        return ptx.pack_pairs(self.dtype, s)


@dataclass(frozen=True)
class WarpgroupLanes(FragmentPosition):
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

    @property
    def first_row(self) -> Int32:
        return self.warpgroup * WARPGROUP_ROWS + self.warp * 16


class RematerializedLanes:
    """`WarpgroupLanes` read at every use, so that nothing derived from them stays in registers in between."""

    def __getattr__(self, name: str) -> Any:
        return getattr(WarpgroupLanes.of(), name)


AnyLanes = WarpgroupLanes | RematerializedLanes
