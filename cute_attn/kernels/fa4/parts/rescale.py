"""Rescaling of O in tensor memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import sm100

COLUMNS = 16  # at a time


@cute.jit
def rescale(o: Int32, columns: Int32, factor: Float32) -> None:
    """Multiplies the first columns of the thread's row of O, a multiple of `COLUMNS`."""
    factors = sm100.pair(factor, factor)
    for at in cutlass.range(0, columns, COLUMNS, unroll=1):
        values, scaled = sm100.wait_loads(sm100.load_columns(o + at, 0, COLUMNS)), []
        for i in cutlass.range_constexpr(0, COLUMNS, 2):
            scaled += sm100.halves(sm100.mul_pair(sm100.pair(values[i], values[i + 1]), factors))
        sm100.store_columns(o + at, 0, scaled)
    sm100.wait_stores()
