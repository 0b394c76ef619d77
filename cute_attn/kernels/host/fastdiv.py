"""Multiplier and shift for `blocks.rows.Divisor`, which divides by multiplication."""

from __future__ import annotations


def magic(divisor: int) -> tuple[int, int]:
    """Returns (multiplier as a signed 32-bit integer, shift): n // divisor = (n * multiplier >> 32) >> shift for 0 <= n
    < 2^31.

    Granlund & Montgomery 1994 with 31-bit dividends. The device handles a divisor of 1.
    """
    if divisor == 1:
        return 0, 0
    power = 31 + (divisor - 1).bit_length()
    multiplier = -(-(1 << power) // divisor)
    return multiplier - (1 << 32) if multiplier >= 1 << 31 else multiplier, power - 32
