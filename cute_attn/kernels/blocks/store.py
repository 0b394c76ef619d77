"""Epilogue of a math warpgroup: normalise, exchange within quads, store. No shared memory, no barrier."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import Finish
from cute_attn.kernels.blocks.rows import HeadRows
from cute_attn.kernels.blocks.softmax import add, reduce_quad
from cute_attn.kernels.blocks.wgmma import GroupLanes, GroupTile


@dataclass(frozen=True)
class GroupStore:
    tile: GroupTile
    dtype: str
    lanes: GroupLanes
    rows: HeadRows
    finish: Finish
    params: Any
    batch: Int32

    @cute.jit
    def write(self, out: list[Float32], shift: list[Float32], total: list[Float32]) -> None:
        """`shift` and `total` as in `Running`: per row slot, sums still per thread."""
        p, head = self.params, self.rows.query_head
        o = p.o + Int64(self.batch) * p.o_stride_b + Int64(head) * p.o_stride_h
        for slot in cutlass.range_constexpr(2):
            row = self.lanes.row(self.tile.memory, slot)
            maximum = Float32(0.0) - shift[slot]
            factor, lse = self.finish.row(maximum, reduce_quad(add, total[slot]), head)
            token = self.rows.token(row)
            values = [x * factor for i, x in enumerate(out) if i % 4 // 2 == slot]
            pieces = self.pieces(values)
            if self.rows.exists(row):
                address = o + Int64(token) * p.o_stride_n + Int64(self.lanes.lane % 4 * 16)
                for i in cutlass.range_constexpr(len(pieces)):
                    ptx.st_global_v4(address, i * 64, pieces[i])
                if cutlass.and_(p.lse != Int64(0), self.lanes.lane % 4 == 0):
                    place = Int64(self.batch * p.qo_len + token) * Int64(p.num_qo_heads) + Int64(head)
                    ptx.st_global_f32(p.lse + place * Int64(4), lse)

    def pieces(self, values: list[Float32]) -> list[list[Int32]]:
        """Of every 32 columns the eight that lane % 4 counts: 16 bytes in one lane."""
        packed = [ptx.pack_16(self.dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]
        return [self.transposed(packed[i : i + 4]) for i in range(0, len(packed), 4)]

    def transposed(self, mine: list[Int32]) -> list[Int32]:
        """Register j of lane l becomes register l of lane j, in each quad."""
        mine = list(mine)
        for bit in (1, 2):
            upper = (self.lanes.lane & bit) != 0
            for low in range(4):
                if not low & bit:
                    high = low | bit
                    got = ptx.shuffle_xor_b32(ptx.select(upper, mine[low], mine[high]), bit)
                    mine[low], mine[high] = ptx.select(upper, got, mine[low]), ptx.select(upper, mine[high], got)
        return mine
