"""Rotary embedding of rows in shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks.rope import RotaryTable
from cute_attn.kernels.blocks.smem import swizzled
from cute_attn.kernels.fa2.parts.kv import Team


@dataclass(frozen=True)
class Rotation(RotaryTable):
    """RoPE of rows in shared memory, `pitch` bytes apart."""

    pitch: int

    @cute.jit
    def rotate_rows(self, team: Team, target: Int32, rows: cutlass.Constexpr, position: cutlass.Constexpr) -> None:
        """Rotates a team's rows in place; `position` maps a row to its token position. The caller provides barriers."""
        pairs = self.head_dim // 16  # of 16-byte chunks
        lanes = 1 << (pairs - 1).bit_length()  # adjacent threads per row: a power of two
        chunk = team.thread % lanes
        if chunk < pairs:
            for row in cutlass.range(team.thread // lanes, rows, team.size // lanes, unroll=1):
                low = target + swizzled(row, chunk, self.pitch)
                high = target + swizzled(row, chunk + pairs, self.pitch)
                self.rotate_chunk(low, high, self.table + chunk * 64, Float32(position(row)))
