"""Store of an MMA warpgroup: normalises, exchanges within quads, stores. No shared memory, no barrier."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, Target
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.softmax import add, reduce_quad
from cute_attn.kernels.fa3.parts.wgmma import WarpgroupLanes, WarpgroupTile


@dataclass(frozen=True)
class WarpgroupStore:
    """Store of a warpgroup's outputs and their lse."""

    tile: WarpgroupTile
    lanes: WarpgroupLanes
    rows: PackedRows
    target: Target | Partials
    epilogue: FinalEpilogue | PartialEpilogue

    @cute.jit
    def write(self, out: list[Float32], shift: list[Float32], total: list[Float32]) -> None:
        """Normalises and stores; `shift` and `total` as in `Running`: per row slot, sums still per thread."""
        for slot in cutlass.range_constexpr(2):
            row = self.lanes.row(self.tile.memory, slot)
            maximum = Float32(0.0) - shift[slot]
            factor, lse = self.epilogue.row(maximum, reduce_quad(add, total[slot]), self.rows.head(row))
            values = [x * factor for i, x in enumerate(out) if i % 4 // 2 == slot]
            if cutlass.const_expr(self.target.dtype == "float32"):
                self.store_pairs(row, values)
            else:
                self.store_chunks(row, values)
            if cutlass.and_(self.lanes.lane % 4 == 0, self.rows.exists(row)):
                self.target.store_lse(self.rows, row, lse)

    @cute.jit
    def store_pairs(self, row: Int32, values: list[Float32]) -> None:
        """Stores fp32 directly: the pairs of a quad are 32 contiguous bytes."""
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.lanes.lane % 4 * 8)
            for i in cutlass.range_constexpr(0, len(values), 2):
                ptx.st_global_v2_f32(address, i * 16, values[i : i + 2])

    @cute.jit
    def store_chunks(self, row: Int32, values: list[Float32]) -> None:
        """Stores 16-bit rows: of every 32 columns, a lane stores eight, those of index lane % 4, as 16 bytes."""
        packed = [ptx.pack_16(self.target.dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]
        chunks = [self.transposed(packed[i : i + 4]) for i in range(0, len(packed), 4)]
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.lanes.lane % 4 * 16)
            for i in cutlass.range_constexpr(len(chunks)):
                ptx.st_global_v4(address, i * 64, chunks[i])

    def transposed(self, mine: list[Int32]) -> list[Int32]:
        """Transposes within each quad: register j of lane l becomes register l of lane j."""
        mine = list(mine)
        for bit in (1, 2):
            upper = (self.lanes.lane & bit) != 0
            for low in range(4):
                if not low & bit:
                    high = low | bit
                    got = ptx.shuffle_xor_b32(ptx.select(upper, mine[low], mine[high]), bit)
                    mine[low], mine[high] = ptx.select(upper, got, mine[low]), ptx.select(upper, mine[high], got)
        return mine
