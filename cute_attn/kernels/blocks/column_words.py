"""Words of 32 columns, bit i set where a mask hides column i.

A word costs a few instructions per chunk of columns, and ptxas turns tests of its bits for zero into predicates, seven
or eight with one R2P.
"""

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx

COLUMNS = 32  # of a word


def columns_before(stop: Int32) -> Int32:
    """Returns the word of the columns below `stop`."""
    return ~columns_from(stop)


def columns_from(start: Int32) -> Int32:
    """Returns the word of the columns from `start`. The shift clamps: nothing is left of 32 and more."""
    return ptx.asm("shl.b32 $0, -1, $1;", [Int32], [ptx.maximum(start, Int32(0))], pure=True)


def hide(s: list[Float32], hidden: Int32, value: Float32) -> list[Float32]:
    """Sets the scores of hidden columns to `value`."""
    word = ptx.opaque(hidden)  # hoisted out of a loop, each test would take an instruction of its own
    bits = [word & Int32(1 << i if i < 31 else -(1 << 31)) for i in range(len(s))]
    return [ptx.select(bit == Int32(0), x, value) for x, bit in zip(s, bits, strict=True)]
