"""Reduction over the lanes of a warp of many values at once."""

from typing import Any

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx

LANES = 32


def reduce_columns(op: Any, values: list[Float32], lane: Int32) -> Float32:
    """Reduces 16 or 32 values over all lanes; lane l returns value l modulo their number.

    Lanes that differ in one bit share the work: each passes on the half of the values that the other keeps.
    """
    if len(values) == LANES // 2:
        values = [op(x, ptx.shuffle_xor(x, LANES // 2)) for x in values]
    while len(values) > 1:
        half = len(values) // 2
        upper = lane & half != Int32(0)
        kept = []
        for low, high in zip(values[:half], values[half:], strict=True):
            keep, give = ptx.select(upper, high, low), ptx.select(upper, low, high)
            kept.append(op(keep, ptx.shuffle_xor(give, half)))
        values = kept
    return values[0]
