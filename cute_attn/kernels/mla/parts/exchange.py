"""Shared memory in which the warps of a row group tell each other numbers per row, P, and their outputs."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.mla.parts.place import Place
from cute_attn.kernels.mla.smem import MlaMemory
from cute_attn.kernels.xqa.parts.merge import Merge


@dataclass(frozen=True)
class Exchange:
    memory: MlaMemory
    place: Place
    base: Int32  # of shared memory

    @cute.jit
    def put_column(self, values: list[Float32]) -> None:
        """Write a number per row slot, the same in all lanes of a quad, to the column of this warp's slice."""
        if self.place.quad_lane == 0:
            column = self.column(self.place.slice)
            for slot in cutlass.range_constexpr(len(values)):
                ptx.st_shared_f32(column + self.place.row(slot) * 4, 0, values[slot])

    def columns(self, slot: int) -> list[Float32]:
        """Read what all slices have put for a row slot."""
        address, step = self.column(Int32(0)) + self.place.row(slot) * 4, self.memory.rows * 4
        return [ptx.ld_shared_f32(address, i * step) for i in range(self.memory.spec.slices)]

    def column(self, index: Int32) -> Int32:
        return self.base + Int32(self.memory.columns) + index * (self.memory.rows * 4)

    def put_p(self, p: list[Float32]) -> None:
        """Write this thread's part of P in 16 bits."""
        place, layout = self.place, self.place.scores
        column = place.slice * place.slice_cols + MmaFragmentLayout.lane_col(place.lane)
        for slot in layout.slots:
            address = self.base + Int32(self.memory.p) + place.row(slot) * self.memory.p_pitch + column * 2
            for i, first in layout.pairs(slot):
                ptx.st_shared_b32(address, first * 2, ptx.pack_16(self.memory.spec.dtype, p[i], p[i + 1]))

    def put_outputs(self, merge: Merge, out: list[Float32]) -> None:
        """Write this thread's outputs where the merge reads them."""
        place, layout = self.place, self.place.outputs
        first = place.slice * place.slice_dim + MmaFragmentLayout.lane_col(place.lane)
        for slot in layout.slots:
            row = place.row(slot)
            address = self.base + Int32(self.memory.outputs) + row * (self.memory.tile_dim * 4)
            for i, column in layout.pairs(slot):
                dim = merge.swizzled_dim(first + column, row)
                ptx.st_shared_v2_f32(address + dim * 4, 0, out[i : i + 2])

    @cute.jit
    def put_stats(self, maxima: list[Float32], totals: list[Float32]) -> None:
        """Write maximum and sum of every row where the merge reads them."""
        if cutlass.and_(self.place.quad_lane == 0, self.place.slice == 0):
            for slot in cutlass.range_constexpr(len(maxima)):
                at = self.base + Int32(self.memory.stats) + self.place.row(slot) * 8
                ptx.st_shared_v2_f32(at, 0, [maxima[slot], totals[slot]])
