"""Rotary embedding of pairs (d, d + D/2) (NeoX order; Su et al. 2021).

The angle is position * theta^(-2i/D) / rope_scale, which in fp32 loses whole radians at position 10^5. Positions are
integers, so that whole turns of a frequency do not count: frequencies are fractions of 64 bits in units of turns, and
the upper 32 bits of their product with a position are the angle: seven instructions, none on the unit of `sin` but the
two. Rotated values are rounded back to 16 bits, which the matrix units need.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import swizzled

RADIANS = 6.283185307179586 / 2**32  # of a unit of `ptx.scaled_fraction`


@dataclass(frozen=True)
class RotaryTable:
    """Table of frequencies in shared memory, and the rotation by them."""

    dtype: str
    head_dim: int
    table: Int32  # shared address of frequencies, words of `ptx.fraction_words`
    base: Float64  # turns per position of pair 0: 1 / (2 pi rope_scale)
    ratio: Float64  # theta^(-2 / head_dim)
    threads: int  # of the CTA

    @cute.jit
    def prepare(self) -> None:
        """Writes the frequency table; a barrier must follow."""
        for first in cutlass.range_constexpr(0, self.head_dim // 2, self.threads):
            pair = cute.arch.thread_idx()[0] + first
            if pair < self.head_dim // 2:
                frequency, power = self.base, self.ratio
                for bit in cutlass.range_constexpr(max(7, (self.head_dim // 2 - 1).bit_length())):
                    # ratio^pair by squaring
                    frequency = ptx.select((pair >> bit) % 2 == 1, frequency * power, frequency)
                    power = power * power
                ptx.st_shared_v2(self.table + pair * 8, 0, [*ptx.fraction_words(frequency)])

    def rotate_chunk(self, sources: Iterable[Int32], targets: Iterable[Int32], chunk: Int32, position: Int32) -> None:
        """Rotates chunk `chunk` of a row, eight dimensions, with its partner half a row to the right: both addresses,
        and where they are written.
        """
        low, high = map(ptx.ld_shared_v4, sources)
        for target, words in zip(targets, self.rotated(low, high, self.table + chunk * 64, position), strict=True):
            ptx.st_shared_v4(target, 0, words)

    def rotated(
        self, low: list[Int32], high: list[Int32], table: Int32, position: Int32
    ) -> tuple[list[Int32], list[Int32]]:
        """Rotates eight dimensions and their partners. `table`: address of the frequency of the first."""
        new_low, new_high = [], []
        for word in range(4):
            a, b = ptx.unpack_16(self.dtype, low[word]), ptx.unpack_16(self.dtype, high[word])
            words = ptx.ld_shared_v4(table, word * 16)
            turned = [self.turn(a[j], b[j], position, *words[2 * j : 2 * j + 2]) for j in (0, 1)]
            new_low.append(ptx.pack_16(self.dtype, turned[0][0], turned[1][0]))
            new_high.append(ptx.pack_16(self.dtype, turned[0][1], turned[1][1]))
        return new_low, new_high

    def turn(self, a: Float32, b: Float32, position: Int32, upper: Int32, lower: Int32) -> tuple[Float32, Float32]:
        angle = ptx.scaled_fraction(position, upper, lower) * Float32(RADIANS)
        sin, cos = ptx.sin(angle), ptx.cos(angle)
        return a * cos - b * sin, b * cos + a * sin


@dataclass(frozen=True)
class RowRotation(RotaryTable):
    """RoPE of rows in shared memory by a team of threads, `pitch` bytes apart."""

    pitch: int

    @cute.jit
    def rotate_rows(self, team: Any, target: Int32, rows: cutlass.Constexpr, position: cutlass.Constexpr) -> None:
        """Rotates a team's rows in place; `position` maps a row to its token position. The caller provides barriers."""
        pairs = self.head_dim // 16  # of 16-byte chunks
        lanes = 1 << (pairs - 1).bit_length()  # adjacent threads per row: a power of two
        chunk = team.thread % lanes
        if chunk < pairs:
            for row in cutlass.range(team.thread // lanes, rows, team.size // lanes, unroll=1):
                both = [target + swizzled(row, at, self.pitch) for at in (chunk, chunk + pairs)]
                self.rotate_chunk(both, both, chunk, Int32(position(row)))
