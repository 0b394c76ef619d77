"""Numbers of tensors of int32 or int64 in device memory."""

import cutlass
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx


def index(address: Int64, step: Int64, wide: Int32, i: Int32) -> Int32:
    """Loads index i of a tensor of int32, or of int64 if `wide` is not 0; -1 if it does not fit 32 bits."""
    place = ptx.mad_u32(i, step, address)
    low = ptx.ld_global_u32(place)
    high = ptx.ld_global_u32_if(place + Int64(4), wide != Int32(0))
    fits = cutlass.or_(wide == Int32(0), high == (low >> 31))
    return ptx.select(fits, low, Int32(-1))
