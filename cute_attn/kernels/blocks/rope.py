"""Rotary embedding of pairs (d, d + D/2) (NeoX order; Su et al. 2021).

In `RotaryTable`, the angle is position * theta^(-2i/D) / rope_scale. In fp32 that product loses whole radians at
position 10^5, so it is formed in units of turns with the frequency as a (hi, lo) pair, reduced to half a turn exactly,
and only then scaled by 2 pi. Rotated values are rounded back to 16 bits, which the matrix units need.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import swizzled

TWO_PI = 6.283185307179586


@dataclass(frozen=True)
class RotaryTable:
    """Table of frequencies in shared memory, and the rotation by them."""

    dtype: str
    head_dim: int
    table: Int32  # shared address of (hi, lo) frequencies
    base: Float64  # turns per position of pair 0: 1 / (2 pi rope_scale)
    ratio: Float64  # theta^(-2 / head_dim)
    threads: int  # of the CTA

    @property
    def power_bits(self) -> int:
        """Bits of an index of a pair."""
        return max(7, (self.head_dim // 2 - 1).bit_length())

    @cute.jit
    def prepare(self) -> None:
        """Writes the frequency table; a barrier must follow."""
        for first in cutlass.range_constexpr(0, self.head_dim // 2, self.threads):
            pair = cute.arch.thread_idx()[0] + first
            if pair < self.head_dim // 2:
                frequency, power = self.base, self.ratio
                for bit in cutlass.range_constexpr(self.power_bits):  # ratio^pair by squaring
                    frequency = ptx.select((pair >> bit) % 2 == 1, frequency * power, frequency)
                    power = power * power
                ptx.st_shared_v2_f32(self.table + pair * 8, 0, self.entry(frequency))

    def entry(self, frequency: Float64) -> list[Float32]:
        """Returns what the table holds of a frequency."""
        return [*ptx.double_to_float_pair(frequency)]

    def rotate_chunk(self, low_at: Int32, high_at: Int32, table: Int32, position: Float32) -> None:
        """Rotates eight dimensions with their eight partners half a row to the right, in place."""
        low, high = self.rotated(ptx.ld_shared_v4(low_at), ptx.ld_shared_v4(high_at), table, position)
        ptx.st_shared_v4(low_at, 0, low)
        ptx.st_shared_v4(high_at, 0, high)

    def rotated(
        self, low: list[Int32], high: list[Int32], table: Int32, position: Any
    ) -> tuple[list[Int32], list[Int32]]:
        """Rotates eight dimensions and their partners. `table`: address of the frequency of the first."""
        new_low, new_high = [], []
        for word in range(4):
            a, b = ptx.unpack_16(self.dtype, low[word]), ptx.unpack_16(self.dtype, high[word])
            turns = ptx.ld_shared_v4_f32(table, word * 16)
            turned = [self.turn(a[j], b[j], position, turns[2 * j], turns[2 * j + 1]) for j in (0, 1)]
            new_low.append(ptx.pack_16(self.dtype, turned[0][0], turned[1][0]))
            new_high.append(ptx.pack_16(self.dtype, turned[0][1], turned[1][1]))
        return new_low, new_high

    def turn(self, a: Float32, b: Float32, position: Any, hi: Float32, lo: Float32) -> tuple[Float32, Float32]:
        angle = self.angle(position, hi, lo)
        sin, cos = ptx.sin(angle), ptx.cos(angle)
        return a * cos - b * sin, b * cos + a * sin

    def angle(self, position: Any, hi: Float32, lo: Float32) -> Float32:
        """Returns the angle in radians, within half a turn."""
        product = position * hi
        error = ptx.fma(position, hi, Float32(0.0) - product)
        turns = (product - ptx.round_to_integer(product)) + ptx.fma(position, lo, error)
        return turns * Float32(TWO_PI)


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
                low = target + swizzled(row, chunk, self.pitch)
                high = target + swizzled(row, chunk + pairs, self.pitch)
                self.rotate_chunk(low, high, self.table + chunk * 64, Float32(position(row)))
