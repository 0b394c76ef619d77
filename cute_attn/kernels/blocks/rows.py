"""Packed query rows: the heads of one GQA group share a K/V head, so they share its tile.

Row r of a kv head is token r // group and query head kv_head * group + r % group. One tile then serves `group` heads
with one read of K and V, and a decode step fills the rows of an MMA with heads.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx


class Divisor(NamedTuple):
    """Division of 0 <= n < 2^31 by a run-time divisor with one multiplication (`params.magic` is the host's half). As a
    parameter of a kernel it is three scalars, named by `scalars_of`.
    """

    value: Int32
    multiplier: Int32
    shift: Int32

    def quotient(self, n: Int32) -> Int32:
        high = ptx.asm("mul.hi.u32 $0, $1, $2;", [Int32], [n, self.multiplier], pure=True)
        return ptx.select(self.value == Int32(1), n, high >> self.shift)


@dataclass(frozen=True)
class PackedRows:
    """Packed rows [first, first + tile rows) of one kv head and request, which has `count` rows in all.

    The request's token 0 is row `start` of q, out and lse.
    """

    first: Int32
    count: Int32
    group: Divisor
    first_head: Int32
    start: Int32

    def token(self, row: Int32) -> Int32:
        return self.group.quotient(self.first + row)

    def head(self, row: Int32) -> Int32:
        packed = self.first + row
        return self.first_head + packed - self.group.quotient(packed) * self.group.value

    def exists(self, row: Int32) -> cutlass.Boolean:
        return self.first + row < self.count

    def last_token(self, rows: int, row: Int32 | int = 0) -> Int32:
        """Token of the last existing row among the `rows` rows from `row`."""
        last = ptx.minimum(self.first + row + Int32(rows), self.count) - Int32(1)
        return self.group.quotient(last)

    def lse_address(self, lse: Int64, row: Int32, num_heads: Int32) -> Int64:
        """Address of a row in fp32 [token, head]."""
        index = Int64(self.start + self.token(row)) * Int64(num_heads) + Int64(self.head(row))
        return lse + index * Int64(4)

    def address(self, base: Int64, row: Int32, token_stride: Int64, head_stride: Int64) -> Int64:
        return base + Int64(self.start + self.token(row)) * token_stride + Int64(self.head(row)) * head_stride
